"""Failing allocations at any place of a step: some requests end, the engine never does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.step import output_processor
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.support import prompt, request
from tests.support.engine.checkpoints_made import write_checkpoint

_GRAMMARS = (
    Grammar(kind=GrammarKind.REGEX, text="[a-z]{1,8}"),
    Grammar(kind=GrammarKind.JSON_OBJECT),
    Grammar(kind=GrammarKind.REGEX, text="(unclosed"),
)
_MAX_STEPS = 3_000
_NUM_ACTIONS = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


class _Faults:
    """Functions that fail now and then, as they do when memory is out."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random = random.Random(seed)
        self._probability = probability
        self.active = True
        self.num_failed: defaultdict[str, int] = defaultdict(int)

    def into(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        working: Callable[..., Any] = getattr(owner, name)

        def failing(*arguments: Any, **named: Any) -> Any:
            if self.active and self._random.random() < self._probability:
                self.num_failed[name] += 1
                raise RuntimeError("can't allocate memory")  # as torch does
            return working(*arguments, **named)

        monkeypatch.setattr(owner, name, failing)


class _Callers:
    """Callers that send all kinds of requests, repeat ids, and cancel in any state."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._open: dict[str, set[int]] = {}
        self._started: set[str] = set()
        self._number = 0
        self.num_ended = self.num_failed = self.num_steps = 0

    def act(self) -> None:
        chance = self._random.random()
        if chance < 0.3:
            self._add(f"r{self._number}")
        elif chance < 0.35 and self._open:
            self._add(self._any())
        elif chance < 0.42 and self._open:
            name = self._any()
            self._engine.cancel(name)
            del self._open[name]
            self._engine.check_integrity()
        else:
            self.step()

    def _any(self) -> str:
        return self._random.choice(sorted(self._open))

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < _MAX_STEPS, f"these never end: {sorted(self._open)}"
        for output in self._engine.step():
            self._take(output)
        self._engine.check_integrity()

    def drain(self) -> None:
        while self._engine.has_work:
            self.step()
        assert not self._open, "the engine forgot somebody"

    def _take(self, output: EngineOutput) -> None:
        choices = self._open.get(output.request_id)
        assert choices is not None, f"{output.request_id} is over, but there is another output"
        assert output.choice in choices
        if output.started:
            self._started.add(output.request_id)
        if not output.finished:
            return
        self.num_failed += output.error is not None
        choices.remove(output.choice)
        if output.request_id not in self._started:
            choices.clear()  # refused as a whole
        if not choices:
            del self._open[output.request_id]
            self.num_ended += 1

    def _add(self, name: str) -> None:
        self._number += 1
        drawn = self._draw(name)
        self._open[name] = set(range(drawn.sampling.n))
        self._started.discard(name)
        self._engine.add(drawn)

    def _draw(self, name: str) -> EngineRequest:
        pick = self._random
        shared = prompt(pick.randint(1, 3), pick.choice((0, 16, 40)), 190)
        token_ids = [*shared, *prompt(self._number, pick.randint(1, 60), 190)]
        if pick.random() < 0.1:
            return EngineRequest(
                request_id=name,
                prompt_token_ids=tuple(token_ids),
                pooling=pick.choice((Pooling.LAST, Pooling.MEAN)),
            )
        options: dict[str, Any] = {"max_tokens": pick.randint(1, 30), "seed": 1}
        kind = pick.randrange(8)
        if kind == 0:
            options |= {"n": pick.randint(2, 4), "temperature": 1.0}
        elif kind == 1:
            options |= {"grammar": pick.choice(_GRAMMARS)}
        elif kind == 2:
            options |= {"prompt_logprobs": 2, "logprobs": 2}
        elif kind == 3:
            options |= {"bad_words": ("a",), "repetition_penalty": 1.2, "temperature": 0.7}
        elif kind == 4:
            options |= {"output_token_ids": (5, 6, 7), "max_tokens": 40}
        elif kind == 5:
            options |= {"max_tokens": 400}  # never fits
        elif kind == 6:
            options |= {"n": pick.randint(1, 4), "use_beam_search": True}
        return request(name, token_ids, priority=pick.randint(-1, 2), **options)


@pytest.mark.parametrize("seed", range(8))
def test_the_engine_outlives_failing_allocations(
    checkpoint: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        num_blocks=24,
        max_num_sequences=6,
        max_batch_tokens=48,
        device="cpu",
        host_cache_bytes=1 << 20,
        idle_offload_s=0.0,
    )
    engine = Engine.load(checkpoint, config)
    faults = _Faults(seed, probability=0.04)
    for owner, name in (
        (engine._runner, "launch"),
        (engine._runner.cache, "finite_blocks"),
        (engine._sampler, "add"),
        (engine._sampler, "_sample_rows"),
        (engine._grammars, "start_masks"),
        (engine._grammars, "masks"),
        (engine._grammars, "accept"),
        (engine._host_memory, "store"),
        (output_processor, "add_chunk"),
        (output_processor, "add_scores"),
        (output_processor, "candidates"),
    ):
        faults.into(monkeypatch, owner, name)
    callers = _Callers(engine, seed)
    for _ in range(_NUM_ACTIONS):
        callers.act()
    callers.drain()
    assert callers.num_failed > 0
    assert len(faults.num_failed) >= 4, "too little failed to tell"
    # And then it is as good as new.
    faults.active = False
    engine.add(request("after", [5, 6, 7], max_tokens=5))
    outputs = [output for _ in range(20) for output in engine.step()]
    assert sum(len(output.token_ids) for output in outputs) == 5
    engine.check_integrity()
    assert engine.stats().num_free_blocks == 24
