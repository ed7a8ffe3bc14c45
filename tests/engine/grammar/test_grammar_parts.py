"""Parts of grammars: vocabularies, threads, the cache, masks and the helper."""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.engine.grammar import compiler as grammar_compiler
from millrace.engine.grammar.compiler import GrammarCompiler
from millrace.engine.grammar.library import (
    MAX_MESSAGE_CHARACTERS,
    GrammarLibrary,
    Matcher,
    shortened,
)
from millrace.engine.grammar.masks import MaskFiller
from millrace.engine.grammar.probe import GrammarProbe
from millrace.engine.grammar.reasoning import ReasoningMatchers
from millrace.engine.step.sequence import Sequence
from millrace.engine.threads.tasks import TaskThreads
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.grammar.grammars import ask, ebnf, helper_processes, regex, schema
from tests.support.engine.tokenizers_made import (
    byte_fallback,
    byte_level,
    metaspace,
    write_tokenizer,
)
from tests.support.waiting import eventually

_TOKENIZERS = {
    "byte level": (byte_level, "<|end|>"),
    "byte fallback": (byte_fallback, "</s>"),
    "metaspace": (metaspace, "</s>"),
}


@pytest.fixture(params=list(_TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    make, eos = _TOKENIZERS[request.param]
    return Tokenizer.load(write_tokenizer(tmp_path, make(), eos=eos))


@pytest.fixture
def bytes_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path, byte_level()))


def allowed(mask: torch.Tensor) -> set[int]:
    bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.view(-1).nonzero()[:, 0].tolist())


def mask_of(matcher: Matcher, num_words: int) -> set[int]:
    mask = torch.zeros(num_words, dtype=torch.int32)
    matcher.fill_mask(mask.data_ptr(), num_words)
    return allowed(mask)


def sequence(request_id: str, grammar: Grammar, **params: Any) -> Sequence:
    request = ask(request_id, grammar, **params)
    return Sequence(request, arrival=0, key=0, max_total_tokens=100)


# --- vocabulary ---


def test_a_text_without_alternatives_is_spelled_out(tokenizer: Tokenizer) -> None:
    """The tokenizer's treatment of a text's beginning does not matter: this text begins within
    another."""
    text = "the stream leads onto a mill"
    library = GrammarLibrary(tokenizer, tokenizer.vocab_size + 45)
    matcher = library.compile(ebnf(f'start: "{text}"'))
    spelled: list[bytes] = []
    while not matcher.complete:
        (token,) = mask_of(matcher, library.num_words)
        spelled.append(tokenizer.token_bytes(token))
        matcher.accept((token,))
    assert b"".join(spelled).decode() == text
    assert len(spelled) < len(text), "whole tokens are forced, not characters"


def test_only_tokens_that_exist_are_allowed(tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(tokenizer, tokenizer.vocab_size + 45)
    matcher = library.compile(regex("(.|\n)*"))
    ids = mask_of(matcher, library.num_words)
    assert max(ids) < tokenizer.vocab_size
    assert ids & tokenizer.special_token_ids == set(library.eos_token_ids)


def test_a_vocabulary_may_be_smaller_than_the_tokenizer(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, 300)
    assert max(mask_of(library.compile(regex("(.|\n)*")), library.num_words)) < 300


def test_without_an_end_there_are_no_grammars(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, byte_level(), eos="<none>"))
    with pytest.raises(GrammarError, match="end-of-sequence"):
        GrammarLibrary(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("pattern", "fits", "too_much"),
    [(None, "", "\n"), (None, " ", " "), (r"[ \n]{1,3}", "\n  ", " "), (r"\n", "\n", " ")],
)
def test_blanks_between_the_parts_of_a_document_are_few(
    bytes_tokenizer: Tokenizer, pattern: str | None, fits: str, too_much: str
) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    grammar = Grammar(kind=GrammarKind.JSON_OBJECT)
    if pattern is not None:
        schema = {"type": "object", "x-guidance": {"whitespace_pattern": pattern}}
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    matcher = library.compile(grammar)
    matcher.accept(bytes_tokenizer.encode("{" + fits, add_special_tokens=False))
    (token_id,) = bytes_tokenizer.encode(too_much, add_special_tokens=False)
    assert not matcher.fits(token_id)
    assert matcher.fits(bytes_tokenizer.encode("}", add_special_tokens=False)[0])


def test_a_schema_that_wants_no_blanks_gets_none(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    for flexible in (False, True):
        text = json.dumps({"type": "object", "x-guidance": {"whitespace_flexible": flexible}})
        matcher = library.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=text))
        matcher.accept(bytes_tokenizer.encode("{", add_special_tokens=False))
        blank = bytes_tokenizer.encode(" ", add_special_tokens=False)[0]
        assert matcher.fits(blank) is flexible


def test_messages_are_short_and_without_pictures() -> None:
    told = (
        'at 1(8): unknown name: "c"\n   1 | start: "a" c\n                  ^\n\n<state>x</state>'
    )
    assert shortened(told) == 'The grammar cannot be used: at 1(8): unknown name: "c"'
    assert len(shortened("x" * 9_000)) < MAX_MESSAGE_CHARACTERS + 40
    assert "no text matches" in shortened("NoExtensionBias\n<non-verbose/>")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]},
            "use anyOf",
        ),
        ({"$ref": "https://example.com/x.json"}, r"put it into \$defs"),
    ],
)
def test_refusals_advise_what_can_be_done(
    bytes_tokenizer: Tokenizer, schema: dict[str, Any], words: str
) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    with pytest.raises(GrammarError, match=words) as caught:
        library.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))
    for word in ("option", "coerce", "registry", "retriev"):
        assert word not in caught.value.message
    assert "limits" not in shortened("lexer precomputation failed; either increase limits.x")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.REGEX, "((", 'used: invalid regex "\\(\\("'),
        (GrammarKind.REGEX, "(?=a)b", "used: invalid regex .* look-around"),
        (GrammarKind.REGEX, "a\\", "ends in a lone backslash"),
        (GrammarKind.REGEX, "a\\\\\\", "ends in a lone backslash"),
        (GrammarKind.EBNF, "start: (", r"used: line 1, column 9: Expected token '\)'"),
        (GrammarKind.EBNF, 'start: "a', "used: line 1, column 10: lexer error"),
        (GrammarKind.EBNF, "start: foo", "used: line 1, column 8: unknown name"),
    ],
)
def test_refusals_point_only_into_what_was_sent(
    bytes_tokenizer: Tokenizer, kind: GrammarKind, text: str, words: str
) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    with pytest.raises(GrammarError, match=words):
        library.compile(Grammar(kind=kind, text=text))


def test_a_regex_may_end_in_an_escaped_backslash(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    matcher = library.compile(Grammar(kind=GrammarKind.REGEX, text="a\\\\"))
    matcher.accept(bytes_tokenizer.encode("a\\", add_special_tokens=False))
    assert matcher.complete


def test_a_panic_of_the_library_is_an_error_of_the_matcher() -> None:
    class Panicking:
        def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
            raise BaseException("panicked")  # noqa: TRY002 (as the library's panics are)

        def consume_tokens(self, token_ids: list[int]) -> bool:
            return True

    matcher = Matcher(Panicking())  # type: ignore[arg-type]
    matcher.fill_mask(0, 1)
    with pytest.raises(GrammarError):
        matcher.accept((1,))


# --- masks ---


def test_masks_are_those_of_each_sequence(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    patterns = [f"[{chr(97 + i)}-z]{{9}}" for i in range(24)]
    sequences = [sequence(pattern, regex(pattern)) for pattern in patterns]
    expected = []
    for one in sequences:
        assert one.request.sampling.grammar is not None
        one.matcher = library.compile(one.request.sampling.grammar)
        expected.append(mask_of(one.matcher.copy(), library.num_words))
    free = sequence("free", regex("x"))
    filler = MaskFiller(library.num_words, library.eos_token_ids)
    for _ in range(3):
        filler.begin(sequences)
        masks = filler.take([*reversed(sequences), free])
        assert [allowed(mask) for mask in masks[:-1]] == expected[::-1]
        assert bool((masks[-1] == -1).all())
    filler.begin(sequences[:2])
    assert [allowed(mask) for mask in filler.take(sequences[:2])] == expected[:2]


def test_an_end_is_withheld_while_something_else_can_come(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    eos = set(library.eos_token_ids)
    ignoring = sequence("i", regex("a*"), ignore_eos=True)
    early = sequence("m", regex("a*"), min_tokens=3)
    done = sequence("d", regex("()"), min_tokens=3, ignore_eos=True)
    for one in (ignoring, early, done):
        assert one.request.sampling.grammar is not None
        one.matcher = library.compile(one.request.sampling.grammar)
    filler = MaskFiller(library.num_words, library.eos_token_ids)
    filler.begin([ignoring, early, done])
    masks = [allowed(mask) for mask in filler.take([ignoring, early, done])]
    assert not masks[0] & eos
    assert not masks[1] & eos
    assert masks[2] == eos
    assert [one.matcher.must_end for one in (ignoring, early, done)] == [False, False, True]


def test_masks_that_cannot_be_filled_allow_nothing() -> None:
    broken = sequence("b", regex("a"))
    broken.matcher = object()
    filler = MaskFiller(3, (1,))
    filler.begin([broken])
    assert allowed(filler.take([broken])[0]) == set()


# --- compiling ---


def test_compiled_grammars_are_kept_and_so_are_refusals(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED_GRAMMARS", 2)
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    compiled: list[str] = []

    def compile_grammar(grammar: Grammar) -> Matcher:
        compiled.append(grammar.text)
        return library.compile(grammar)

    settled = threading.Semaphore(0)
    compiler = GrammarCompiler(compile_grammar, ReasoningMatchers(lambda: library), settled.release)
    for text in ["a", "(", "a", "(", "b", "a", "("]:
        one = sequence(text, regex(text))
        compiler.submit([one])
        over = compiler.pop_settled()
        while not one.ready and not over:
            assert settled.acquire(timeout=30)
            over = compiler.pop_settled()
        assert one.ready == (one.matcher is not None) == (text != "(")
        assert [(o.sequence, o.error is None) for o in over] == (
            [] if one.ready else [(one, False)]
        )
    assert compiled == ["a", "(", "b", "a", "("]


def test_a_grammar_that_is_there_makes_sequences_ready_at_once(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    settled = threading.Semaphore(0)
    compiler = GrammarCompiler(library.compile, ReasoningMatchers(lambda: library), settled.release)
    compiler.submit([sequence("first", regex("ab"))])
    assert settled.acquire(timeout=30)
    choices = [sequence(name, regex("ab")) for name in "xyz"]
    compiler.submit(choices)
    assert all(one.ready for one in choices)
    assert len({id(one.matcher) for one in choices}) == 3
    resumed = sequence("r", regex("ab"), output_token_ids=(bytes_tokenizer.encode("a")[-1],))
    compiler.submit([resumed])
    assert settled.acquire(timeout=30)
    assert resumed.ready


def test_any_failure_of_a_grammar_ends_its_request(bytes_tokenizer: Tokenizer) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    settled = threading.Semaphore(0)

    def compile_grammar(grammar: Grammar) -> Matcher:
        raise SystemError("no Exception of ours")

    compiler = GrammarCompiler(compile_grammar, ReasoningMatchers(lambda: library), settled.release)
    for _ in range(2):
        compiler.submit([sequence("a", regex("a"))])
        assert settled.acquire(timeout=30)
        (over,) = compiler.pop_settled()
        assert over.error is not None
        assert over.error.code == GrammarError.code


async def test_threads_end_with_their_owner() -> None:
    done = threading.Event()

    def fail() -> None:
        raise ValueError("this one fails")

    threads = TaskThreads("test-tasks", 2, stack_bytes=1 << 20)
    threads.submit(fail)
    threads.submit(done.set)
    assert done.wait(30), "an error ends no thread"

    def running() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("test-tasks")]

    assert len(running()) == 2
    del threads
    gc.collect()
    await eventually(lambda: not running(), timeout_s=30)


# --- the helper ---


@pytest.fixture(scope="module")
def probe() -> Iterator[GrammarProbe]:
    probe = GrammarProbe()
    yield probe
    probe.close()


def _chain(length: int) -> Grammar:
    rules = (f"a{i}: a{i + 1}" for i in range(length))
    return ebnf("\n".join(["start: a0", *rules, f'a{length}: "x"']))


def test_good_and_bad_grammars_are_told_apart(probe: GrammarProbe) -> None:
    probe.check(regex("é+"))
    probe.check(schema({"type": "object"}))
    with pytest.raises(GrammarError, match="unclosed group"):
        probe.check(regex("(a"))
    with pytest.raises(GrammarError, match="Unicode"):
        probe.check(regex("\ud800"))


_REPEATED = [f'A{i}: (A{i + 1} | "z")+' for i in range(300)]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (_chain(4_000), "too deeply nested"),
        (schema({"type": "integer", "multipleOf": 99_999_999}), "too long"),
        (ebnf("\n".join(['start: "x" A0', *_REPEATED, 'A300: "x"'])), "too many expressions"),
    ],
)
def test_grammar_that_would_crash_or_hang_the_engine_costs_one_request(
    probe: GrammarProbe, grammar: Grammar, why: str
) -> None:
    with pytest.raises(GrammarError, match=why):
        probe.check(grammar)
    probe.check(regex("a"))


async def test_a_helper_that_died_while_it_was_idle_is_replaced() -> None:
    others = set(helper_processes())
    probe = GrammarProbe()
    probe.check(regex("a"))
    (helper,) = set(helper_processes()) - others
    helper.send_signal(signal.SIGKILL)
    await eventually(lambda: helper.status() == psutil.STATUS_ZOMBIE, timeout_s=30)
    probe.check(regex("b"))
    probe.close()


def test_a_helper_that_does_not_start_is_an_error_of_the_request() -> None:
    broken = GrammarProbe(command=[sys.executable, "-c", "pass"])
    with pytest.raises(GrammarError, match="cannot be compiled here"):
        broken.check(regex("a"))


def test_deep_grammars_that_passed_are_compiled_with_a_deep_stack(
    bytes_tokenizer: Tokenizer,
) -> None:
    library = GrammarLibrary(bytes_tokenizer, bytes_tokenizer.vocab_size)
    settled = threading.Semaphore(0)
    compiler = GrammarCompiler(library.compile, ReasoningMatchers(lambda: library), settled.release)
    one = sequence("deep", _chain(5_000))
    compiler.submit([one])
    assert settled.acquire(timeout=30)
    assert one.ready
    assert one.matcher is not None
