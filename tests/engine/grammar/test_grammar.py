"""Grammars hold a random model to the end, beside all other requests."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.grammar.library import GrammarLibrary, Matcher
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import GrammarError, ParameterError
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.conftest import MakeEngine
from tests.engine.grammar.grammars import (
    WORDS,
    Answers,
    ask,
    ebnf,
    load_engine,
    regex,
    run,
    save_checkpoint,
    schema,
)
from tests.engine.support import drain

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "漢字"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return load_engine(path)


# --- what comes out obeys ---

_LEAVES: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -20, "maximum": 1_000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{1,3}-é$"},
    {"enum": ["x", 1, None, "漢"]},
    {"const": {"k": [1, 2]}},
]


def _grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 2},
        inner,
        st.integers(0, 2),
    )
    objects = st.dictionaries(st.sampled_from(["a", "b c", 'd"', "ü"]), inner, max_size=3).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": list(fields)[:2],
            "additionalProperties": False,
        }
    )
    return arrays | objects | st.lists(inner, min_size=1, max_size=2).map(lambda x: {"anyOf": x})


@settings(max_examples=12, deadline=None)
@given(schemas=st.lists(st.recursive(st.sampled_from(_LEAVES), _grown, max_leaves=5), max_size=6))
def test_random_schemas_are_obeyed(
    engine: Engine, tokenizer: Tokenizer, schemas: list[dict[str, Any]]
) -> None:
    answers = run(
        engine,
        tokenizer,
        *(ask(str(i), schema(one), max_tokens=2_000) for i, one in enumerate(schemas)),
    )
    for i, one in enumerate(schemas):
        assert answers.reason(str(i)) is FinishReason.STOP, answers.ends[str(i), 0]
        jsonschema.validate(json.loads(answers.text(str(i))), one)


@pytest.mark.parametrize(
    "pattern",
    [WORDS, r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"(?i:yes|no)[.!]?", "[é漢👍🏽ß]{3,6}", r"x(\n|\t)y"],
)
def test_regexes_are_matched(engine: Engine, tokenizer: Tokenizer, pattern: str) -> None:
    answers = run(engine, tokenizer, *(ask(str(i), regex(pattern)) for i in range(4)))
    for i in range(4):
        assert answers.reason(str(i)) is FinishReason.STOP
        assert re.fullmatch(pattern, answers.text(str(i))), answers.text(str(i))
    assert len({answers.text(str(i)) for i in range(4)}) > 1 or pattern.startswith(("x", "(?i"))


@pytest.mark.parametrize(
    "text",
    [
        'start: "(" expr ")"\nexpr: /[0-9]/ (op /[0-9]/)~2\nop: "+" | "-"',
        'root ::= "(" expr ")"\nexpr ::= [0-9] op [0-9] op [0-9]\nop ::= "+" | "-"',
    ],
    ids=["lark", "gbnf"],
)
def test_grammars_are_followed(engine: Engine, tokenizer: Tokenizer, text: str) -> None:
    answers = run(engine, tokenizer, ask("a", ebnf(text)))
    assert answers.reason("a") is FinishReason.STOP
    assert re.fullmatch(r"\([0-9]([+-][0-9]){2}\)", answers.text("a"))


def test_any_object_is_an_object(engine: Engine, tokenizer: Tokenizer) -> None:
    any_object = Grammar(kind=GrammarKind.JSON_OBJECT)
    answers = run(engine, tokenizer, *(ask(f"o{i}", any_object, max_tokens=500) for i in range(6)))
    stopped = [i for i in range(6) if answers.reason(f"o{i}") is FinishReason.STOP]
    for i in range(6):
        assert answers.text(f"o{i}").lstrip().startswith("{")
    assert stopped
    assert all(isinstance(json.loads(answers.text(f"o{i}")), dict) for i in stopped)


# --- how it ends ---


def test_a_bound_cuts_it(engine: Engine, tokenizer: Tokenizer) -> None:
    answers = run(engine, tokenizer, ask("a", regex("[a-z]{100}"), max_tokens=5))
    assert answers.reason("a") is FinishReason.LENGTH
    assert re.fullmatch("[a-z]+", answers.text("a"))


def test_completion_goes_on_while_the_end_is_ignored_and_text_can_follow(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    answers = run(
        engine,
        tokenizer,
        *(ask(f"i{i}", regex("[ab]{2,9}"), ignore_eos=True) for i in range(4)),
        *(ask(f"e{i}", regex("[ab]{2,9}")) for i in range(4)),
    )
    assert [len(answers.text(f"i{i}")) for i in range(4)] == [9] * 4
    assert min(len(answers.text(f"e{i}")) for i in range(4)) < 9
    assert all(end.finish_reason is FinishReason.STOP for end in answers.ends.values())


def test_a_finished_grammar_wins_over_min_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    answers = run(
        engine,
        tokenizer,
        ask("short", regex("(ab|cd)?"), min_tokens=50),
        ask("empty", ebnf('start: ""'), min_tokens=50),
        ask("long", regex("[ab]*"), min_tokens=50),
        ask("x", ebnf('start: "x" /y?/'), min_tokens=50, ignore_eos=True),
    )
    assert answers.text("short") in ("ab", "cd")
    assert answers.text("empty") == ""
    assert len(answers.tokens["long", 0]) >= 50
    assert answers.text("x") == "xy"
    assert all(end.finish_reason is FinishReason.STOP for end in answers.ends.values())


def test_stop_tokens_of_the_request_end_it_within(engine: Engine, tokenizer: Tokenizer) -> None:
    stop = tokenizer.encode("b", add_special_tokens=False)[0]
    answers = run(engine, tokenizer, ask("a", regex("[ab]{200}"), stop_token_ids=(stop,)))
    assert answers.reason("a") is FinishReason.STOP
    assert re.fullmatch("a*b", answers.text("a"))


@pytest.mark.parametrize(
    "grammar",
    [
        regex("("),
        regex("(?=a)b"),
        ebnf('start: "a" b'),
        ebnf('root ::= "a" b'),
        ebnf("start: start"),
        schema({"type": "objct"}),
        schema({"type": "string", "format": "no-such"}),
        schema({"not": {"type": "string"}}),
        Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"),
        Grammar(kind=GrammarKind.JSON_SCHEMA, text="[1]"),
        regex("é\ud800"),
    ],
)
def test_a_bad_grammar_ends_its_request_alone(
    engine: Engine, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    answers = run(engine, tokenizer, ask("bad", grammar, n=2), ask("good", regex(WORDS)))
    for choice in (0, 1):
        error = answers.error("bad", choice)
        assert error is not None
        assert error[0] == GrammarError.code
        assert len(error[1]) < 300
        assert "\n" not in error[1]
    assert answers.tokens["bad", 0] == []
    assert re.fullmatch(WORDS, answers.text("good"))


def test_a_failure_on_the_way_ends_that_sequence_alone(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(engine, tokenizer, ask("other", regex(WORDS)))
    accept = Matcher.accept
    seen: list[Matcher] = []

    def failing(self: Matcher, token_ids: tuple[int, ...]) -> None:
        if token_ids and not seen:
            seen.append(self)
        if token_ids and seen[0] is self:
            raise GrammarError("It cannot be followed any further.")
        accept(self, token_ids)

    monkeypatch.setattr(Matcher, "accept", failing)
    engine.add(ask("broken", regex(WORDS)))
    outputs: list[EngineOutput] = []
    while not seen:
        outputs += engine.step()
    engine.add(ask("other", regex(WORDS)))
    answers = Answers(outputs + drain(engine), tokenizer)
    assert answers.error("broken") == (GrammarError.code, "It cannot be followed any further.")
    assert answers.text("other") == undisturbed.text("other")


# --- choices, company, preemption, resumption ---


def test_choices_have_matchers_of_their_own(engine: Engine, tokenizer: Tokenizer) -> None:
    alone = run(engine, tokenizer, ask("a", schema(_PERSON)))
    answers = run(engine, tokenizer, ask("a", schema(_PERSON), n=4))
    texts = [answers.text("a", choice) for choice in range(4)]
    for text in texts:
        jsonschema.validate(json.loads(text), _PERSON)
    assert texts[0] == alone.text("a")
    assert len(set(texts)) > 1


def test_company_changes_nothing(engine: Engine, tokenizer: Tokenizer) -> None:
    requests = [
        ask("words", regex(WORDS)),
        ask("person", schema(_PERSON), temperature=0.7, top_p=0.9),
        ask("greedy", schema(_PERSON), temperature=0.0),
        ask("free", None, max_tokens=40),
        ask("sum", ebnf('start: /[0-9]+/ "+" /[0-9]{1,9}/'), ignore_eos=True, logprobs=2),
    ]
    alone = {one.request_id: run(engine, tokenizer, one) for one in requests}
    together = run(engine, tokenizer, *requests)
    for one in requests:
        assert together.tokens[one.request_id, 0] == alone[one.request_id].tokens[one.request_id, 0]


def test_a_resumed_completion_goes_on_where_it_was(engine: Engine, tokenizer: Tokenizer) -> None:
    for grammar in (regex(WORDS), schema(_PERSON), regex("[é漢👍🏽]{8}")):
        tokens = run(engine, tokenizer, ask("a", grammar)).tokens["a", 0]
        cuts = sorted({1, len(tokens) // 3, len(tokens) // 2, len(tokens) - 1})
        for cut in cuts:
            answers = run(
                engine, tokenizer, ask("a", grammar, output_token_ids=tuple(tokens[:cut]))
            )
            assert tokens[:cut] + answers.tokens["a", 0] == tokens
            assert answers.reason("a") is FinishReason.STOP


def test_resumed_complete_text_ends_at_once(engine: Engine, tokenizer: Tokenizer) -> None:
    tokens = run(engine, tokenizer, ask("a", regex("[ab]{5}"))).tokens["a", 0]
    answers = run(engine, tokenizer, ask("a", regex("[ab]{5}"), output_token_ids=tuple(tokens)))
    assert answers.tokens["a", 0] == []
    assert answers.reason("a") is FinishReason.STOP


def test_tokens_that_no_grammar_made_are_refused(engine: Engine, tokenizer: Tokenizer) -> None:
    strange = tuple(tokenizer.encode("xyz", add_special_tokens=False))
    answers = run(engine, tokenizer, ask("a", regex("[ab]{5}"), output_token_ids=strange))
    error = answers.error("a")
    assert error is not None
    assert error[0] == GrammarError.code


def test_a_preempted_sequence_keeps_its_place(
    path: Path, engine: Engine, tokenizer: Tokenizer
) -> None:
    requests = [ask(f"p{i}", regex("[a-z ]{120}"), max_tokens=150) for i in range(6)]
    roomy = run(engine, tokenizer, *requests)
    tight_engine = load_engine(path, num_blocks=14)
    tight = run(tight_engine, tokenizer, *requests)
    assert tight_engine.stats().num_preemptions > 0
    for one in requests:
        assert tight.tokens[one.request_id, 0] == roomy.tokens[one.request_id, 0]


# --- off the step path ---


class SlowCompiler:
    """Compiler that waits until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.let = threading.Event()
        compile_now = GrammarLibrary.compile

        def compile_late(library: GrammarLibrary, grammar: Grammar) -> Matcher:
            self.entered.set()
            assert self.let.wait(30)
            return compile_now(library, grammar)

        monkeypatch.setattr(GrammarLibrary, "compile", compile_late)


def test_slow_grammar_delays_no_other_request(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(path)
    compiler = SlowCompiler(monkeypatch)
    engine.add(ask("slow", regex(WORDS)))
    assert compiler.entered.wait(30)
    engine.add(ask("free", None, ignore_eos=True, max_tokens=30))
    outputs: list[EngineOutput] = []
    while not any(output.finished for output in outputs):
        outputs += engine.step()
        engine.check_integrity()
    assert {output.request_id for output in outputs} == {"free"}
    assert engine.has_work
    compiler.let.set()
    answers = Answers(outputs + drain(engine), tokenizer)
    assert re.fullmatch(WORDS, answers.text("slow"))


def test_a_request_can_be_cancelled_while_its_grammar_compiles(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(path)
    compiler = SlowCompiler(monkeypatch)
    engine.add(ask("gone", regex("[ab]{3}"), n=2))
    engine.add(ask("bad", regex("(")))
    assert compiler.entered.wait(30)
    engine.cancel("gone")
    engine.cancel("bad")
    assert not engine.has_work
    engine.check_integrity()
    compiler.let.set()
    answers = run(engine, tokenizer, ask("next", regex("[ab]{3}")))
    assert re.fullmatch("[ab]{3}", answers.text("next"))
    assert set(answers.ends) == {("next", 0)}


def test_one_grammar_is_compiled_once(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Grammar] = []
    compile_now = GrammarLibrary.compile

    def counted(library: GrammarLibrary, grammar: Grammar) -> Matcher:
        compiled.append(grammar)
        return compile_now(library, grammar)

    monkeypatch.setattr(GrammarLibrary, "compile", counted)
    run(load_engine(path), tokenizer, *(ask(str(i), schema(_PERSON), n=2) for i in range(5)))
    assert compiled == [schema(_PERSON)]


def test_without_grammars_there_are_no_threads(path: Path, tokenizer: Tokenizer) -> None:
    before = set(threading.enumerate())
    run(load_engine(path), tokenizer, ask("a", None))
    assert set(threading.enumerate()) <= before


def test_a_checkpoint_without_a_tokenizer_takes_no_grammar(
    make_engine: MakeEngine, tokenizer: Tokenizer
) -> None:
    answers = run(make_engine(), tokenizer, ask("a", regex("a")), ask("b", None, max_tokens=3))
    error = answers.error("a")
    assert error is not None
    assert error[0] == GrammarError.code
    assert "tokenizer" in error[1]
    assert answers.error("b") is None


def test_an_embedding_has_no_grammar(engine: Engine, tokenizer: Tokenizer) -> None:
    embedding = msgspec.structs.replace(ask("a", regex("a")), pooling=Pooling.LAST)
    assert run(engine, tokenizer, embedding).error("a") == (
        ParameterError.code,
        "A request for an embedding or labels takes no grammar; leave it out.",
    )
