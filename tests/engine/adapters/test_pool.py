"""Pool of adapters: loading, eviction and waiting, in any order of events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.scheduling.running import RunningSequences
from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.threads.tasks import TaskThreads
from millrace.engine.types import EngineRequest
from millrace.schemas.errors import AdapterError
from millrace.schemas.models.adapters import AdapterRef


class _Threads(TaskThreads):
    """Loader that runs a task when the test says so."""

    def __init__(self) -> None:
        super().__init__("none", 0)
        self.tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)


class _World:
    """Model of a planner: sequences wait by rank, begin as far as there is room, and end."""

    def __init__(self, num_slots: int, broken: frozenset[str] = frozenset()) -> None:
        self.threads = _Threads()
        self.num_settled = 0
        self.broken = broken
        self.slots = [""] * num_slots
        self.pool = AdapterPool(
            num_slots, self._load, self._on_loaded, lambda: 0.0, threads=self.threads
        )
        self.running = RunningSequences(self.pool)
        self.waiting: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.num_made = 0

    def _load(self, adapter: AdapterRef, slot: int) -> tuple[str, int]:
        self.slots[slot] = "rests"
        if adapter.name in self.broken:
            raise AdapterError(f"{adapter.name} is broken")
        self.slots[slot] = adapter.name
        return f"weights of {adapter.name}", slot

    def _on_loaded(self) -> None:
        self.num_settled += 1

    def add(self, name: str) -> Sequence:
        adapter = AdapterRef(name=name, version=f"version of {name}", source="") if name else None
        one = Sequence(
            EngineRequest(request_id=str(self.num_made), prompt_token_ids=(1,), adapter=adapter),
            arrival=self.num_made,
            key=0,
            max_total_tokens=2,
        )
        self.num_made += 1
        self.pool.prepare(one)
        one.enter(SequenceState.WAITING)
        self.waiting.append(one)
        return one

    def load_one(self, index: int = 0) -> None:
        if self.threads.tasks:
            self.threads.tasks.pop(index % len(self.threads.tasks))()

    def step(self, batch: int = 1000) -> None:
        for sequence, error in self.pool.settle():
            assert isinstance(error, AdapterError)
            self.waiting.remove(sequence)
            self.failed.append(sequence)
            self._end(sequence)
        for sequence in sorted(self.waiting, key=lambda one: one.rank):
            if len(self.running) < batch and sequence.ready and self.pool.admits(sequence):
                self.waiting.remove(sequence)
                self.running.enter(sequence)
        self.pool.check_integrity(self.running)
        for sequence in self.running:
            adapter = sequence.request.adapter
            if adapter is None:
                assert sequence.adapter_weights is None
            else:
                weights, slot = sequence.adapter_weights
                assert weights == f"weights of {adapter.name}"
                assert self.slots[slot] == adapter.name

    def finish(self, sequence: Sequence) -> None:
        self.running.leave(sequence)
        self._end(sequence)

    def preempt(self, sequence: Sequence) -> None:
        self.running.leave(sequence)
        sequence.enter(SequenceState.WAITING)
        self.waiting.append(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.enter(SequenceState.FINISHED)
        self.pool.forget(sequence)

    def names(self) -> list[str]:
        return [one.name for one in self.pool.loaded()]


@settings(max_examples=150, deadline=None)
@given(
    num_slots=st.integers(1, 4),
    num_names=st.integers(1, 7),
    batch=st.integers(1, 6),
    seed=st.integers(0, 2**30),
)
def test_no_sequence_waits_for_ever_and_running_sequences_keep_their_slots(
    num_slots: int, num_names: int, batch: int, seed: int
) -> None:
    pick = random.Random(seed)
    world = _World(num_slots, broken=frozenset({"n0"} if seed % 3 == 0 else ()))
    for _ in range(60):
        event = pick.random()
        if event < 0.35:
            world.add(pick.choice(["", *(f"n{i}" for i in range(num_names))]))
        elif event < 0.55:
            world.load_one(pick.randrange(8))
        elif event < 0.7 and world.running:
            world.finish(pick.choice(world.running))
        elif event < 0.75 and world.running:
            world.preempt(pick.choice(world.running))
        elif event < 0.8 and world.waiting:
            gone = pick.choice(world.waiting)
            world.waiting.remove(gone)
            world._end(gone)
        world.step(batch)
    for _ in range(400):
        if not (world.waiting or world.running):
            break
        world.load_one()
        world.step(batch)
        if world.running:
            world.finish(world.running[0])
    assert not world.waiting
    assert {one.request.adapter and one.request.adapter.name for one in world.failed} <= {"n0"}


def test_the_least_recently_used_goes_first() -> None:
    world = _World(2)
    for name in ("a", "b", "a", "c"):
        one = world.add(name)
        world.step()
        while one not in world.running:
            world.load_one()
            world.step()
        world.finish(one)
    assert world.names() == ["a", "c"]
    assert world.pool.num_loads == 3
    assert world.pool.num_evictions == 1


def test_other_sequences_go_on_while_an_adapter_is_loaded() -> None:
    world = _World(2)
    slow, base = world.add("slow"), world.add("")
    world.step()
    assert base in world.running
    assert slow in world.waiting
    assert not slow.ready
    world.load_one()
    world.step()
    assert slow in world.running


def test_sequence_that_waits_for_a_slot_is_not_passed_for_ever() -> None:
    world = _World(1)
    first = world.add("busy")
    world.load_one()
    world.step()
    waits = world.add("rare")
    world.step()
    # What comes later for the adapter that is there no longer goes before it.
    later = world.add("busy")
    world.step()
    assert list(world.running) == [first]
    world.finish(first)
    world.step()
    world.load_one()
    world.step()
    assert list(world.running) == [waits]
    world.finish(waits)
    world.step()
    world.load_one()
    world.step()
    assert list(world.running) == [later]


def test_adapters_of_waiting_sequences_are_not_evicted_for_later_ones() -> None:
    world = _World(1)
    world.add("a")
    world.load_one()
    world.step(batch=0)
    world.add("b")
    assert not world.threads.tasks
    assert world.names() == ["a"]


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_a_load_that_fails_ends_those_that_wait_and_is_tried_again(num_waiting: int) -> None:
    world = _World(2, broken=frozenset({"bad"}))
    for _ in range(num_waiting):
        world.add("bad")
    world.step()
    world.load_one()
    world.step()
    assert len(world.failed) == num_waiting
    assert world.names() == []
    world.broken = frozenset()
    again = world.add("bad")
    world.load_one()
    world.step()
    assert again in world.running
