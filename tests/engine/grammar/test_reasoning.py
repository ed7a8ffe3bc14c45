"""Thoughts of a random model: thoughts before a grammar, and forced ends of thoughts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.reasoning import ReasoningParser, num_reasoning_tokens
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar
from tests.engine.checkpoints import save_llama
from tests.engine.grammar.grammars import ask, load_engine, regex, run, schema
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer

OPEN = ReasoningFormat(is_open=True)
_BUDGET = 7
_LIGHT = schema(
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module", params=["one token", "several tokens"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Llama; each of its thought markers is one token, or several."""
    tokenizer = byte_level()
    if request.param == "one token":
        tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("\n\n")])
    path = tmp_path_factory.mktemp("reasoning")
    save_llama(
        path,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=4_096,
        bos_token_id=0,
        eos_token_id=1,
    )
    return write_tokenizer(path, tokenizer)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return load_engine(path)


def limited(
    name: str, grammar: Grammar | None, budget: int | None = _BUDGET, **params: Any
) -> EngineRequest:
    settings: dict[str, Any] = {"reasoning": OPEN, "max_reasoning_tokens": budget} | params
    return ask(name, grammar, **settings)


def told(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[str, str]:
    parser = ReasoningParser(OPEN)
    thoughts, answer = parser.push(tokenizer.decode(token_ids))
    rest, late = parser.finish()
    return thoughts + rest, answer + late


@pytest.mark.parametrize("budget", [0, 1, _BUDGET])
def test_a_grammar_holds_behind_the_thoughts(
    engine: Engine, tokenizer: Tokenizer, budget: int
) -> None:
    made = run(engine, tokenizer, *(limited(f"r{i}", _LIGHT, budget) for i in range(8)))
    for i in range(8):
        token_ids = made.tokens[f"r{i}", 0]
        thoughts, answer = told(tokenizer, token_ids)
        assert isinstance(json.loads(answer)["on"], bool)
        assert made.reason(f"r{i}") is FinishReason.STOP
        pieces = [tokenizer.decode([one]) for one in token_ids]
        closing = len(tokenizer.encode("\n</think>\n\n", add_special_tokens=False))
        assert num_reasoning_tokens(OPEN, pieces) <= budget + closing
        assert budget or not thoughts


def test_thoughts_are_ended_without_a_grammar(engine: Engine, tokenizer: Tokenizer) -> None:
    """The tokens up to the end of the budget equal those of a request without a budget."""
    free = ask("r", None, reasoning=OPEN, max_tokens=40, ignore_eos=True)
    limit = msgspec.structs.replace(free.sampling, max_reasoning_tokens=_BUDGET)
    without = run(engine, tokenizer, free).tokens["r", 0]
    ended = run(engine, tokenizer, msgspec.structs.replace(free, sampling=limit)).tokens["r", 0]
    closing = tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    assert ended[:_BUDGET] == without[:_BUDGET]
    assert ended[_BUDGET : _BUDGET + len(closing)] == closing
    assert len(ended) == 40


def test_thoughts_that_the_model_begins_itself(engine: Engine, tokenizer: Tokenizer) -> None:
    """A model may begin thoughts itself if a single token begins them; otherwise the grammar holds
    at once."""
    start = tokenizer.encode("<think>", add_special_tokens=False)
    bias = {start[0]: 100.0} if len(start) == 1 else {}
    request = limited("r", regex("[a-c]{3}"), 5, reasoning=ReasoningFormat(), logit_bias=bias)
    made = run(engine, tokenizer, request)
    text = made.text("r")
    if bias:
        assert text.startswith("<think>")
        assert "</think>" in text
    assert set(text.rpartition("</think>")[2].strip()) <= set("abc")
    assert len(text.rpartition("</think>")[2].strip()) == 3


@pytest.mark.parametrize("path", ["one token"], indirect=True)
def test_thoughts_end_by_themselves(engine: Engine, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("</think>", add_special_tokens=False)
    request = limited("r", regex("[a-c]{3}"), None, logit_bias={end[0]: 50.0})
    made = run(engine, tokenizer, request)
    assert made.tokens["r", 0][0] == end[0]
    assert len(told(tokenizer, made.tokens["r", 0])[1]) == 3


def test_completion_with_thoughts_resumes_behind_any_token(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    for grammar in (_LIGHT, None):
        request = limited("r", grammar, 4, max_tokens=30)
        whole = run(engine, tokenizer, request).tokens["r", 0]
        for count in range(1, len(whole)):
            rest = msgspec.structs.replace(request, output_token_ids=tuple(whole[:count]))
            made = run(engine, tokenizer, rest).tokens.get(("r", 0), [])
            assert [*whole[:count], *made] == whole, count


def test_choices_think_for_themselves(engine: Engine, tokenizer: Tokenizer) -> None:
    made = run(engine, tokenizer, limited("r", _LIGHT, n=3))
    texts = {made.text("r", choice) for choice in range(3)}
    assert len(texts) > 1
    for choice in range(3):
        assert isinstance(json.loads(told(tokenizer, made.tokens["r", choice])[1])["on"], bool)
