"""Two engines that hand blocks to each other under load, short of memory on both sides."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from tests.engine.kv.peer_world import BLOCK_BYTES, World
from tests.engine.support import drain, prompt, request, tokens_by_request

_NUM_REQUESTS = 40
_WITHIN_S = 60.0


@pytest.fixture
def world(llama: tuple[Path, Any], tmp_path: Path) -> Iterator[World]:
    made = World(llama[0], tmp_path / "peers")
    yield made
    made.close()


def _load(seed: int) -> list[EngineRequest]:
    """Draw requests of two tenants, many with common beginnings."""
    generator = random.Random(seed)
    stems = [prompt(stem, 200) for stem in range(3)]
    made = []
    for number in range(_NUM_REQUESTS):
        stem = generator.choice(stems)[: generator.randrange(10, 200)]
        made.append(
            request(
                f"r{number}",
                stem + prompt(100 + number, generator.randrange(1, 20)),
                max_tokens=generator.randrange(1, 40),
                temperature=generator.choice([0.0, 1.0]),
                seed=number,
                cache_salt=generator.choice(["a", "b"]),
                priority=generator.choice([0, 0, 1]),
            )
        )
    return made


@pytest.mark.parametrize(
    ("seed", "lends_cache"), [(0, True), (1, True), (2, False), (3, False)], ids=str
)
def test_every_request_has_the_tokens_that_it_would_have_alone(
    world: World, seed: int, lends_cache: bool
) -> None:
    load = _load(seed)
    alone = world.start(num_blocks=400, max_num_sequences=_NUM_REQUESTS)
    for item in load:
        alone.add(item)
    expected = tokens_by_request(drain(alone))
    address = "127.0.0.1:0" if seed % 2 else ""
    engines = [
        world.start(
            address=address,
            lends_cache=lends_cache,
            num_blocks=24,
            host_cache_bytes=12 * BLOCK_BYTES,
            max_num_sequences=4,
            idle_offload_s=0.5,
        )
        for _ in range(2)
    ]
    made, cancelled = _run(world, engines, load, random.Random(seed), remote=bool(address))
    for name, tokens in made.items():
        if name in cancelled:
            assert tokens == expected[name][: len(tokens)]
        else:
            assert tokens == expected[name]
    assert len(made.keys() | cancelled) == _NUM_REQUESTS
    assert sum(engine.stats().num_pulled_blocks for engine in engines) > 0
    for engine in engines:
        _settle(world, engines)
        assert engine.stats().num_free_blocks == 24
        engine.check_integrity()


def _run(
    world: World,
    engines: list[Engine],
    load: list[EngineRequest],
    generator: random.Random,
    *,
    remote: bool,
) -> tuple[dict[str, list[int]], set[str]]:
    """Return the tokens of each request, and the cancelled requests. Engines step in turn, as their
    processes would, and rest if they have nothing to do."""
    made: defaultdict[str, list[int]] = defaultdict(list)
    cancelled: set[str] = set()
    left = list(load)
    until_s = time.monotonic() + _WITHIN_S
    while left or any(engine.has_work for engine in engines):
        assert time.monotonic() < until_s
        if left and generator.random() < 0.3:
            item = left.pop()
            at = generator.randrange(2)
            endpoint = {"host": "elsewhere"} if remote else {}
            source = world.source(engines[1 - at], **endpoint)  # type: ignore[arg-type]
            engines[at].add(msgspec.structs.replace(item, kv_source=source))
            if generator.random() < 0.2:
                cancelled.add(item.request_id)
                _step(engines, made, generator)
                engines[at].cancel(item.request_id)
        if generator.random() < 0.05:
            world.now_s += generator.choice([0.2, 1.0, 4.0])
        _step(engines, made, generator)
    return made, cancelled


def _step(engines: list[Engine], made: dict[str, list[int]], generator: random.Random) -> None:
    for engine in generator.sample(engines, 2):
        if engine.has_work:
            for output in engine.step():
                assert output.error is None
                made[output.request_id] += output.token_ids
        else:
            engine.rest()
        engine.check_integrity()


def _settle(world: World, engines: list[Engine]) -> None:
    """Wait until no transfer between the engines is in flight."""
    until_s = time.monotonic() + _WITHIN_S
    while any(engine._tiers.is_busy for engine in engines):
        assert time.monotonic() < until_s
        world.now_s += 0.1
        for engine in engines:
            engine.rest()
            engine._bell.wait(0.001)
