"""Random loads on random pools: each request gets the tokens that it gets alone, and nothing
leaks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.scheduling.planner import MAX_PREEMPTIONS
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from tests.engine.kv.test_host_cache import BLOCK_BYTES
from tests.engine.support import SteppingClock, drawn_settings, prompt, request, resolved

POISON = 198
MAX_STEPS = 3000


class Arrival(NamedTuple):
    """A request: ``shared_tokens`` of one of three common beginnings, then tokens of its own;
    ``gap`` steps before the next one, and cancelled after so many steps, if at all."""

    family: int
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    priority: int
    n: int
    beams: bool
    seed: int
    poisoned: bool
    gap: int
    cancel_after: int | None

    def request(self, number: int) -> EngineRequest:
        token_ids = [*prompt(self.family, self.shared_tokens, 190), *prompt(number, 1, 190)]
        token_ids += [POISON] if self.poisoned else []
        token_ids += prompt(self.seed, self.own_tokens, 190)
        if self.beams:
            return request(
                f"r{number}",
                token_ids,
                max_tokens=self.max_tokens,
                priority=self.priority,
                n=self.n,
                use_beam_search=True,
                stop_token_ids=tuple(range(0, 190, 9)),
            )
        return request(
            f"r{number}",
            token_ids,
            max_tokens=self.max_tokens,
            priority=self.priority,
            n=self.n,
            seed=self.seed,
            temperature=0.9 if self.seed % 2 else 0.0,
            ignore_eos=True,
            logit_bias={POISON: -100.0},
        )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        family=st.integers(1, 3),
        shared_tokens=st.sampled_from([0, 15, 16, 33, 48, 70]),
        own_tokens=st.integers(0, 40),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 2),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        beams=st.sampled_from([False, False, True]),
        seed=st.integers(0, 5),
        poisoned=st.sampled_from([False] * 7 + [True]),
        gap=st.integers(0, 8),
        cancel_after=st.none() | st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=12,
)
CONFIGS = drawn_settings(BLOCK_BYTES)


class World:
    """Engine under a load, and all of its outputs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], EngineOutput] = {}
        self.often_preempted: set[str] = set()
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "somebody never ends"
        for output in self.engine.step():
            key = (output.request_id, output.choice)
            assert key not in self.ended, "an output after the last one"
            self.tokens[key] += output.token_ids
            assert output.num_preemptions <= MAX_PREEMPTIONS or key[0] in self.often_preempted
            if output.finished:
                self.ended[key] = output
        self.engine.check_integrity()

    def run(self, arrivals: list[Arrival]) -> None:
        due: list[tuple[int, str]] = []

        def tick() -> None:
            self.step()
            for when, name in due:
                if when == self.num_steps:
                    self.engine.cancel(name)
                    self.engine.check_integrity()

        for number, arrival in enumerate(arrivals):
            item = arrival.request(number)
            if item.priority < 0 or arrival.beams:  # of beams it is the sum
                self.often_preempted.add(item.request_id)
            self.engine.add(item)
            if arrival.cancel_after is not None:
                due.append((self.num_steps + 1 + arrival.cancel_after, item.request_id))
            for _ in range(arrival.gap):
                tick()
        while self.engine.has_work:
            tick()


@pytest.fixture(scope="module")
def runners(llama: tuple[Path, Any]) -> dict[int, ModelRunner]:
    """Return runners by number of blocks, all with a poisoned token."""
    made: dict[int, ModelRunner] = {}
    for num_blocks in (9, 11, 16, 24, 600):
        made[num_blocks] = ModelRunner.load(
            llama[0], resolved(llama[0], num_blocks=num_blocks, device="cpu")
        )
        made[num_blocks].embedding[POISON] = float("nan")
    return made


def alone(runner: ModelRunner, arrivals: list[Arrival]) -> World:
    """Run the same requests in a pool without bounds and without caches."""
    config = resolved(prefix_cache=False, host_cache_bytes=0)
    world = World(Engine(runner, config, monotonic=SteppingClock()))
    world.run([arrival._replace(gap=0, cancel_after=None) for arrival in arrivals])
    return world


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.sampled_from([9, 11, 16, 24]),
    config=CONFIGS,
    swaps_are_fast=st.booleans(),
)
def test_any_load_on_any_pool(
    runners: dict[int, ModelRunner],
    arrivals: list[Arrival],
    num_blocks: int,
    config: dict[str, Any],
    swaps_are_fast: bool,
) -> None:
    expected = alone(runners[600], arrivals)
    runner = runners[num_blocks]
    engine = Engine(runner, resolved(**config), monotonic=SteppingClock())
    if swaps_are_fast:
        engine._planner.recompute_s = lambda num_tokens: 1e9  # type: ignore[method-assign]
    world = World(engine)
    world.run(arrivals)
    for number, arrival in enumerate(arrivals):
        name = f"r{number}"
        for choice in range(arrival.n):
            key = (name, choice)
            if key in world.ended:
                assert world.tokens[key] == expected.tokens[key]
                ours, theirs = world.ended[key], expected.ended[key]
                assert (ours.finish_reason, ours.error) == (theirs.finish_reason, theirs.error)
                # A beam may find the poisoned token by itself.
                assert (ours.error is not None) == arrival.poisoned or arrival.beams
            else:
                assert arrival.cancel_after is not None, f"{name} never ended"
                tokens = world.tokens[key]
                assert tokens == expected.tokens[key][: len(tokens)]
    stats = engine.stats()
    assert stats.num_free_blocks == num_blocks
    assert (stats.outstanding_tokens, stats.num_running, stats.num_waiting) == (0, 0, 0)
