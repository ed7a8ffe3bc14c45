"""Several completions of one prompt: the same tokens as alone, from shared blocks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput
from millrace.schemas.config import EngineConfig
from tests.engine.conftest import MakeEngine
from tests.engine.support import drain, prompt, request

RUNNERS = ("host", "device")

NUM_CHOICES = 5


def tokens_by_choice(outputs: list[EngineOutput]) -> dict[tuple[str, int], list[int]]:
    tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for output in outputs:
        tokens[output.request_id, output.choice] += output.token_ids
    return dict(tokens)


def drawn(request_id: str, num_prompt_tokens: int, n: int = NUM_CHOICES, **params: Any) -> Any:
    settings = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 20, "n": n}
    return request(request_id, prompt(3, num_prompt_tokens), **(settings | params))


@pytest.fixture(scope="module")
def alone(llama: tuple[Path, Any]) -> dict[int, dict[int, list[int]]]:
    """Return the tokens of choices by length of the prompt, without other requests in the pool."""
    tokens: dict[int, dict[int, list[int]]] = {}
    config = EngineConfig(num_blocks=256, device="cpu", prefix_cache=False)
    for length in (1, 31, 32, 33, 100):
        engine = Engine.load(llama[0], config)
        engine.add(drawn("r", length))
        tokens[length] = {c: t for (_, c), t in tokens_by_choice(drain(engine)).items()}
    return tokens


def test_choice_0_is_the_request_without_choices(
    make_engine: MakeEngine, alone: dict[int, dict[int, list[int]]]
) -> None:
    engine = make_engine()
    engine.add(drawn("r", 33, n=1))
    assert tokens_by_choice(drain(engine)) == {("r", 0): alone[33][0]}
    assert len({tuple(tokens) for tokens in alone[33].values()}) == NUM_CHOICES


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("max_num_sequences", [64, 3, 1])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_depend_on_neither_slots_nor_cache(
    make_engine: MakeEngine,
    alone: dict[int, dict[int, list[int]]],
    length: int,
    max_num_sequences: int,
    prefix_cache: bool,
) -> None:
    engine = make_engine(
        max_num_sequences=max_num_sequences, prefix_cache=prefix_cache, max_batch_tokens=40
    )
    engine.add(drawn("r", length))
    tokens = tokens_by_choice(drain(engine))
    assert tokens == {("r", choice): own for choice, own in alone[length].items()}
    assert engine.stats().num_free_blocks == 128


def test_the_prompt_is_computed_and_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=128)
    engine.add(drawn("r", 160 + 5, max_tokens=8))
    outputs = engine.step()
    assert sorted((o.choice, len(o.token_ids)) for o in outputs) == [(c, 1) for c in range(5)]
    engine.step()
    # Ten full blocks together, and an own last one each.
    assert 128 - engine.stats().num_free_blocks == 10 + NUM_CHOICES
    drain(engine)
    assert engine.stats().prefill_tokens == 165


def test_choices_that_end_at_their_first_token_need_no_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=3)
    engine.add(drawn("r", 40, max_tokens=1))
    outputs = engine.step()
    assert [o.choice for o in outputs] == list(range(NUM_CHOICES))
    assert all(o.finished for o in outputs)
    engine.check_integrity()
    assert not engine.has_work


def test_a_request_with_choices_is_cancelled_as_one(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_sequences=3, max_batch_tokens=64)
    for steps in range(5):
        engine.add(drawn("r", 100))
        for _ in range(steps):
            engine.step()
        engine.cancel("r")
        engine.check_integrity()
        assert not engine.has_work
        assert engine.stats().outstanding_tokens == 0
        assert engine.stats().num_free_blocks == 128


def test_a_failing_prompt_ends_every_choice(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fail(plan: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(engine._runner, "launch", fail)
    engine.add(drawn("r", 10))
    outputs = drain(engine)
    assert sorted(o.choice for o in outputs if o.error) == list(range(NUM_CHOICES))


def test_only_one_completion_is_resumed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(drawn("r", 10, output_token_ids=(5,)))
    (last,) = engine.step()
    assert last.error is not None
    assert last.error[0] == "invalid_parameter"
