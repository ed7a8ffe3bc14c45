"""Writer of the object cache: bounds of its memory, and its predictions about the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from millrace.engine.kv.objects import object_writer
from millrace.engine.kv.objects.object_writer import ObjectWriter
from millrace.engine.kv.objects.store_view import KnownObjects, StoreSpeed
from tests.engine.kv.objects.object_world import BLOCK_BYTES, World, ask
from tests.engine.support import prompt


@pytest.fixture
def world(llama: tuple[Path, Any]) -> World:
    return World(llama[0], MemoryStore())


def _writer(engine: Any) -> ObjectWriter:
    assert engine._tiers.objects is not None
    writer = engine._tiers.objects.writer
    assert isinstance(writer, ObjectWriter)
    return writer


def test_writes_that_wait_for_a_slow_store_take_half_of_host_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.start(host_cache_bytes=8 * BLOCK_BYTES)
    writer = _writer(engine)
    tasks: list[Callable[[], None]] = []
    monkeypatch.setattr(writer._threads, "submit", tasks.append)
    for seed in (1, 2):
        ask(engine, prompt(seed, 90))
    world.now_s += 100.0
    for _ in range(3):
        engine.rest()
    assert len(list(writer.pinned_keys())) == 4
    assert len(tasks) == 2
    engine.check_integrity()
    while tasks:
        tasks.pop(0)()
        engine.rest()
    assert not writer.is_busy
    assert engine.stats().num_object_written_blocks == 12
    engine.check_integrity()


def test_writes_beyond_the_bound_are_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_writer, "_MAX_NOTED_KEYS", 10)
    engine = world.start()
    for seed in (1, 2):
        ask(engine, prompt(seed, 90))
    assert engine.stats().num_object_dropped_blocks == 6
    world.rest(engine)
    assert engine.stats().num_object_written_blocks == 6


def test_a_prefix_that_comes_again_and_again_is_noted_once(world: World) -> None:
    engine = world.start()
    for _ in range(4):
        ask(engine)
    assert len(_writer(engine)._noted) == 1
    world.rest(engine)
    assert engine.stats().num_object_written_blocks == 6
    ask(engine)
    assert not _writer(engine).is_busy


def test_blocks_evicted_before_they_are_due_are_not_written(world: World) -> None:
    engine = world.start()
    for seed in (1, 2, 3, 4, 5):  # more than the device has blocks for
        ask(engine, prompt(seed, 140), max_tokens=2)
    world.rest(engine)
    assert 0 < engine.stats().num_object_written_blocks < 40


def test_looks_in_vain_make_looking_dearer() -> None:
    speed = StoreSpeed()
    first = speed.brings_s(1000)
    for _ in range(50):
        speed.note_look(found=False)
    assert first < speed.brings_s(1000) == pytest.approx(10 * speed.wait_s, rel=0.01)
    for _ in range(50):
        speed.note_look(found=True)
    assert speed.brings_s(1000) == pytest.approx(speed.wait_s, rel=0.01)


def test_a_store_is_predicted_by_what_was_measured() -> None:
    speed = StoreSpeed()
    for _ in range(50):
        speed.note_look(found=True)
        speed.note_answer(0.1)
    speed.note_bytes(10**6, 0.6)
    assert speed.brings_s(10**6) == pytest.approx(0.6, rel=0.01)
    speed.note_bytes(10**6, 0.05)  # faster than any answer so far
    assert speed.bytes_per_s > 2e6


def test_what_is_known_is_bounded() -> None:
    now_s = 0.0
    known = KnownObjects(lambda: now_s, max_known=2)
    for key in (b"a", b"b", b"c"):
        known.note_present(key)
    assert [known.is_present(key) for key in (b"a", b"b", b"c")] == [False, True, True]
    for key in (b"b", b"d", b"e"):
        known.note_damaged(key)
    assert [known.is_absent(key) for key in (b"b", b"d", b"e")] == [False, True, True]
    assert not known.is_present(b"b")
    now_s = 11.0
    assert not known.is_absent(b"e")
    assert known.is_damaged(b"d")
    known.note_present(b"d")
    assert not known.is_damaged(b"d")
