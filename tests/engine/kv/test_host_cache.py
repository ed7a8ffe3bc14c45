"""Host memory for blocks: what goes out comes back the same, and nothing is lost or kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kv.host_cache import HostCache
from millrace.engine.kv.host_memory import PlainHostMemory
from millrace.engine.step.engine import Engine
from tests.engine.conftest import MakeEngine
from tests.engine.support import (
    drain,
    last_by_request,
    prompt,
    request,
    resolved,
    tokens_by_request,
)

BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4


class Shelf:
    """Host memory that holds the number of each block put there."""

    block_bytes = 100
    bytes_per_s = None

    def __init__(self, num_slots: int, *, fails: bool = False) -> None:
        self.num_slots = num_slots
        self.contents: dict[int, int] = {}
        self.loaded: list[tuple[int, int]] = []
        self._fails = fails

    def store(self, blocks: list[int], slots: list[int]) -> None:
        if self._fails:
            raise RuntimeError("no memory")
        self.contents.update(zip(slots, blocks, strict=True))

    def load(self, slots: list[int], blocks: list[int]) -> None:
        self.loaded += [(self.contents[s], b) for s, b in zip(slots, blocks, strict=True)]


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_the_least_recently_used_gives_way_unless_pinned() -> None:
    shelf = Shelf(3)
    cache = HostCache(shelf)
    assert cache.store(names(1, 2, 3), [1, 2, 3]) == 3
    cache.pin(names(1))
    cache.load(names(2), [20])
    assert cache.store(names(4), [4]) == 1
    assert [key in cache for key in names(1, 2, 3, 4)] == [True, True, False, True]
    cache.load(names(1, 4), [10, 40])
    assert shelf.loaded == [(2, 20), (1, 10), (4, 40)]
    cache.check_integrity(names(1))
    cache.unpin(names(1))
    cache.check_integrity([])
    assert cache.num_evicted_blocks == 1


def test_a_prefix_of_what_does_not_fit_is_stored() -> None:
    cache = HostCache(Shelf(3))
    cache.store(names(1, 2), [1, 2])
    cache.pin(names(1))
    # 2 was there before and must not give way to what comes with it.
    assert cache.store(names(1, 2, 3, 4), [1, 2, 3, 4]) == 3
    assert all(key in cache for key in names(1, 2, 3))
    cache.check_integrity(names(1))


def test_without_memory_it_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    cache = HostCache(Shelf(3, fails=True))
    assert cache.store(names(1, 2), [1, 2]) == 0
    assert (len(cache), cache.num_slots) == (0, 2)
    cache.check_integrity([])


@settings(deadline=None)
@given(
    num_slots=st.integers(0, 4),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["store", "pin", "unpin", "load"]),
            st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        ),
        max_size=40,
    ),
)
def test_host_cache_stays_consistent_over_any_history(
    num_slots: int, operations: list[tuple[str, list[int]]]
) -> None:
    shelf = Shelf(num_slots)
    cache = HostCache(shelf)
    pinned: list[bytes] = []
    for operation, numbers in operations:
        keys = names(*numbers)
        if operation == "store":
            num_stored = cache.store(keys, numbers)
            assert all(key in cache for key in keys[:num_stored])
        elif operation == "pin" and all(key in cache for key in keys):
            cache.pin(keys)
            pinned += keys
        elif operation == "unpin" and pinned:
            cache.unpin([pinned.pop()])
        elif operation == "load" and all(key in cache for key in keys):
            shelf.loaded.clear()
            cache.load(keys, numbers)
            assert all(stored == wanted for stored, wanted in shelf.loaded)
        cache.check_integrity(pinned)
        assert all(key in cache for key in pinned)
        assert len(cache) <= num_slots


def test_blocks_come_back_as_they_were(make_engine: MakeEngine) -> None:
    cache = make_engine(num_blocks=12)._runner.cache
    memory = PlainHostMemory(cache, 8 * BLOCK_BYTES + 5)
    assert (memory.num_slots, memory.block_bytes) == (8, BLOCK_BYTES)
    cache.data.normal_()
    before = cache.data.clone()
    blocks, slots = [3, 4, 5, 9, 0, 11, 10], [1, 2, 3, 0, 7, 5, 6]
    memory.store(blocks, slots)
    cache.data[:, blocks] = 0
    memory.load(slots, blocks)
    assert torch.equal(cache.data, before)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def runner(llama: tuple[Path, Any]) -> ModelRunner:
    return ModelRunner.load(llama[0], resolved(llama[0], num_blocks=24, device="cpu"))


def test_threads_that_fill_slots_first_share_the_memory(make_engine: MakeEngine) -> None:
    cache = make_engine()._runner.cache
    for _ in range(20):
        memory = PlainHostMemory(cache, 8 * BLOCK_BYTES)
        at_once = threading.Barrier(8)

        def fill(
            slot: int, memory: PlainHostMemory = memory, at_once: threading.Barrier = at_once
        ) -> None:
            at_once.wait()
            for piece in memory.pieces(slot):
                piece[:] = bytes([slot + 1]) * piece.nbytes

        threads = [threading.Thread(target=fill, args=(slot,)) for slot in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [memory.pieces(slot)[0][0] for slot in range(8)] == list(range(1, 9))


def test_an_idle_conversation_moves_out_and_comes_back(runner: ModelRunner) -> None:
    clock = Clock()
    config = resolved(idle_offload_s=30.0, host_cache_bytes=6 * BLOCK_BYTES)
    engine = Engine(runner, config, monotonic=clock)
    history = prompt(1, 90)

    def ask(name: str, token_ids: list[int]) -> tuple[list[int], int]:
        engine.add(request(name, token_ids))
        outputs = drain(engine)
        return tokens_by_request(outputs)[name], next(
            o for o in outputs if o.started
        ).num_cached_tokens

    first, _ = ask("r", history)
    clock.now_s += 29.0
    ask("other", prompt(2, 5))
    assert engine.stats().num_used_host_blocks == 0
    clock.now_s += 2.0
    ask("other", prompt(2, 5))
    stats = engine.stats()
    assert (stats.num_used_host_blocks, stats.num_offloaded_blocks) == (6, 6)
    assert stats.num_idle_blocks == 1  # that of the other one, which is younger
    runner.cache.data[:, :24] = 0  # free blocks are never read
    again, num_cached = ask("r", history)
    assert (again, num_cached) == (first, 80)
    stats = engine.stats()
    assert stats.num_reloaded_blocks == 5
    assert (stats.prefix_hit_tokens, stats.host_hit_tokens) == (80, 80)


def fast_swaps(engine: Engine) -> None:
    """Make the cost model take computing for slow."""
    engine._planner.recompute_s = lambda num_tokens: 1e9  # type: ignore[method-assign]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("host_blocks", [0, 2, 100])
def test_swapped_sequences_go_on_with_the_same_tokens(
    make_engine: MakeEngine, prefix_cache: bool, host_blocks: int
) -> None:
    requests = [request(f"r{i}", prompt(i, 30 + i), max_tokens=60) for i in range(6)]
    roomy = make_engine(num_blocks=128, prefix_cache=False)
    tight = make_engine(
        num_blocks=14, prefix_cache=prefix_cache, host_cache_bytes=host_blocks * BLOCK_BYTES
    )
    fast_swaps(tight)
    for item in requests:
        roomy.add(item)
        tight.add(item)
    assert tokens_by_request(drain(tight)) == tokens_by_request(drain(roomy))
    stats = tight.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (host_blocks > 0)
    if host_blocks == 100:
        assert stats.num_swaps == stats.num_preemptions
        assert stats.num_reloaded_blocks > 0


def test_a_cancelled_swapped_sequence_unpins_its_copies(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, max_num_sequences=1)
    fast_swaps(engine)
    engine.add(request("low", prompt(1, 60), max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.add(request("high", prompt(2, 20), priority=1))
    engine.step()
    assert engine.stats().num_swaps == 1
    engine.check_integrity()
    engine.cancel("low")
    engine.check_integrity()
    assert last_by_request(drain(engine)).keys() == {"high"}
