"""Faults of a store: a store that fails, hangs or lies costs time and no token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.kv.objects.block_objects import open_store
from millrace.engine.step.engine import Engine
from tests.engine.kv.objects.faulty_s3 import FaultyS3
from tests.engine.kv.objects.object_world import HISTORY, World, ask
from tests.engine.support import drain, prompt, request, tokens_by_request
from tests.support.engine.s3 import BUCKET, S3Server, s3_environment

_TIMEOUT_S = 0.3


@pytest.fixture
def world(llama: tuple[Path, Any], faulty: FaultyS3, tmp_path: Path) -> World:
    return World(llama[0], open_store(f"s3://{BUCKET}/{tmp_path.name}", _TIMEOUT_S))


@pytest.fixture
def expected(world: World) -> list[int]:
    """Return the tokens of a prompt that is in the store from then on."""
    engine = world.start()
    tokens, _ = ask(engine)
    world.rest(engine)
    assert engine.stats().num_object_written_blocks == 6
    return tokens


def _is_left_alone(engine: Engine) -> bool:
    return engine.stats().is_object_store_left_alone


@pytest.mark.parametrize("fault", ["cut", "forbidden", "hangs"])
def test_a_read_that_fails_is_computed_and_the_store_left_alone(
    world: World, faulty: FaultyS3, expected: list[int], fault: str
) -> None:
    engine = world.start()
    faulty.fault = fault
    assert ask(engine) == (expected, 0)
    assert engine.stats().num_object_failures >= 1
    assert _is_left_alone(engine)
    engine.check_integrity()
    # Nothing is asked of it meanwhile.
    faulty.fault = ""
    before = faulty.num_requests
    ask(engine, prompt(8, 90))
    assert faulty.num_requests == before
    world.now_s += 1.1
    assert not _is_left_alone(engine)
    world.rest(engine)
    ask(engine, prompt(7, 90))
    assert faulty.num_requests > before
    assert not _is_left_alone(engine)
    assert ask(world.start()) == (expected, 64)


@pytest.mark.parametrize("fault", ["short", "changed"])
def test_an_object_that_is_not_what_was_written_is_computed(
    world: World, faulty: FaultyS3, expected: list[int], fault: str
) -> None:
    engine = world.start()
    faulty.fault = fault
    tokens, found = ask(engine)
    assert tokens == expected
    assert found <= 16  # half of the first object may be whole
    assert engine.stats().num_object_failures >= 1
    assert not _is_left_alone(engine)
    # The bad object is overwritten.
    faulty.fault = ""
    world.rest(engine)
    assert engine.stats().num_object_written_blocks >= 2
    assert ask(world.start()) == (expected, 64)


def test_the_pause_grows_and_ends(world: World, faulty: FaultyS3, expected: list[int]) -> None:
    engine = world.start()
    faulty.fault = "forbidden"
    for number, pause_s in enumerate((1.0, 2.0, 4.0)):
        ask(engine, prompt(30 + number, 90))
        world.now_s += pause_s - 0.1
        assert _is_left_alone(engine)
        world.now_s += 0.2
        assert not _is_left_alone(engine)
    faulty.fault = ""
    ask(engine, prompt(40, 90))
    faulty.fault = "forbidden"
    ask(engine, prompt(41, 90))
    world.now_s += 1.1
    assert not _is_left_alone(engine)


def test_a_store_that_hangs_holds_up_a_prompt_for_a_while_only(
    world: World, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.start()
    assert engine._tiers.objects is not None
    tasks: list[Any] = []
    monkeypatch.setattr(engine._tiers.objects.tier._threads, "submit", tasks.append)
    engine.add(request("r", HISTORY))
    assert engine.step() == []
    world.now_s += 3.0
    outputs = drain(engine)
    assert tokens_by_request(outputs)["r"] == expected
    # A late task asks the store no more.
    for task in tasks:
        task()
    engine.step()
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.num_object_read_blocks, stats.num_object_failures) == (0, 0)


def test_what_cannot_be_written_is_dropped(world: World, faulty: FaultyS3) -> None:
    engine = world.start(object_cache_min_tokens=80)
    ask(engine)
    faulty.fault = "forbidden"
    world.rest(engine)
    stats = engine.stats()
    assert stats.num_object_written_blocks == 0
    assert stats.num_object_dropped_blocks > 0
    assert stats.num_object_failures >= 1
    faulty.fault = ""
    ask(engine)
    world.rest(engine)
    assert engine.stats().num_object_written_blocks == 6


def test_nothing_in_a_step_waits_for_a_store_that_hangs(world: World, faulty: FaultyS3) -> None:
    engine = world.start(object_cache_min_tokens=80)
    ask(engine)
    faulty.fault = "hangs"
    world.now_s += 100.0
    longest_s = 0.0
    engine.add(request("r", prompt(6, 40), max_tokens=60))
    while engine.has_work:
        begin_s = time.perf_counter()
        engine.step()
        longest_s = max(longest_s, time.perf_counter() - begin_s)
    assert engine._tiers.is_busy
    assert longest_s < _TIMEOUT_S


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    for name, value in s3_environment(server.url).items():
        monkeypatch.setenv(name, value)
    yield server
    server.kill()


def test_a_server_that_is_killed(llama: tuple[Path, Any], own_server: S3Server) -> None:
    world = World(llama[0], open_store(f"s3://{BUCKET}/x", _TIMEOUT_S))
    engine = world.start()
    expected, _ = ask(engine)
    world.rest(engine)
    other = world.start()
    own_server.kill()
    assert ask(other) == (expected, 0)
    assert _is_left_alone(other)
    other.check_integrity()
