"""Engines that share an object store find each other's blocks, and compute missing blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from millrace.engine.config import check_config
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence_group import make_sequence_group
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.kv.objects.conftest import StoreUnderTest
from tests.engine.kv.objects.object_world import (
    BLOCK_BYTES,
    BLOCKS_PER_OBJECT,
    HISTORY,
    World,
    ask,
)
from tests.engine.support import drain, prompt, request, resolved
from tests.support.engine.s3 import BUCKET

_RUN_TOKENS = 16 * BLOCKS_PER_OBJECT


@pytest.fixture
def world(llama: tuple[Path, Any]) -> World:
    return World(llama[0], MemoryStore())


class TestSharing:
    """Engines that share a store, for each kind of store."""

    @pytest.fixture
    def world(self, llama: tuple[Path, Any], stored: StoreUnderTest) -> World:
        return World(llama[0], stored.store)

    def test_another_worker_finds_what_one_has_computed(self, world: World) -> None:
        engine, other = world.start(), world.start()
        expected, found = ask(engine)
        assert found == 0
        world.rest(engine)
        written = engine.stats()
        # With the answer it is six blocks and a part.
        assert written.num_object_written_blocks == 6
        assert written.num_object_written_bytes == 6 * BLOCK_BYTES
        assert ask(other) == (expected, 64)
        stats = other.stats()
        assert (stats.num_object_read_blocks, stats.num_object_read_bytes) == (4, 4 * BLOCK_BYTES)
        assert (stats.object_hit_tokens, stats.disk_hit_tokens, stats.peer_hit_tokens) == (64, 0, 0)
        # The object is stored, so it is not written again; the next engine finds it as well.
        world.rest(other)
        assert other.stats().num_object_written_blocks == 0
        assert ask(world.start()) == (expected, 64)
        assert (engine.stats().num_object_failures, other.stats().num_object_failures) == (0, 0)

    def test_other_weights_types_or_words_find_nothing(self, world: World) -> None:
        engine = world.start()
        ask(engine, cache_salt="acme")
        world.rest(engine)
        assert ask(world.start())[1] == 0
        assert ask(world.start(kv_cache_dtype="int8"), cache_salt="acme")[1] == 0
        assert ask(world.start(), cache_salt="acme")[1] == 64

    @pytest.mark.parametrize("same", [20, 33, 63])
    def test_prefixes_that_part_in_the_middle_of_an_object(self, world: World, same: int) -> None:
        engine = world.start()
        ask(engine)
        world.rest(engine)
        parted = HISTORY[:same] + prompt(9, 90 - same)
        expected, _ = ask(world.start(object_cache_min_tokens=10**6), parted)
        other = world.start()
        assert ask(other, parted) == (expected, same // _RUN_TOKENS * _RUN_TOKENS)
        # What it computed is found beside what was there.
        world.rest(other)
        third = world.start()
        assert ask(third, parted) == (expected, 64)
        assert ask(third)[1] == 64

    @pytest.mark.parametrize("seed", range(2))
    def test_any_prompts_in_any_order_get_the_tokens_that_are_computed(
        self, world: World, seed: int
    ) -> None:
        source = random.Random(seed)
        alone = world.start(object_cache_min_tokens=10**6)
        sharing = [world.start(host_cache_bytes=12 * BLOCK_BYTES) for _ in range(2)]
        asked: list[list[int]] = [HISTORY]
        for number in range(8):
            before = source.choice(asked)
            kept = source.randrange(len(before))
            asked.append(before[:kept] + prompt(100 * seed + number, source.randrange(20, 120)))
            asked[-1] = asked[-1][:200]
            engine = source.choice(sharing)
            salt = source.choice(["", "acme"])
            expected, _ = ask(alone, asked[-1], cache_salt=salt)
            assert ask(engine, asked[-1], cache_salt=salt)[0] == expected
            if source.random() < 0.6:
                world.rest(engine)
        stats = [engine.stats() for engine in sharing]
        assert sum(one.num_object_written_blocks for one in stats) > 0
        assert sum(one.num_object_failures for one in stats) == 0


def test_a_prompt_that_ends_with_an_object_has_all_of_it_but_its_last_block(world: World) -> None:
    engine = world.start()
    expected, _ = ask(engine, HISTORY[:64])
    world.rest(engine)
    assert ask(world.start(), HISTORY[:64]) == (expected, 48)


def test_blocks_in_memory_are_not_read_again(world: World) -> None:
    engine, other = world.start(), world.start()
    expected, _ = ask(engine)
    world.rest(engine)
    ask(other, HISTORY[:50])  # three blocks, of which the last is half an object
    read = other.stats().num_object_read_blocks
    assert ask(other) == (expected, 64)
    assert other.stats().num_object_read_blocks == read + 1


def test_short_prompts_are_neither_written_nor_looked_for(world: World) -> None:
    engine = world.start(object_cache_min_tokens=96)
    ask(engine, HISTORY[:70])
    world.rest(engine)
    stats = engine.stats()
    assert (stats.num_object_written_blocks, stats.num_absent_objects) == (0, 0)
    assert not engine._tiers.is_busy
    ask(engine, prompt(3, 96))
    world.rest(engine)
    stats = engine.stats()
    assert stats.num_object_written_blocks == 6
    assert stats.num_absent_objects >= 1


def test_missing_object_is_not_looked_for_again_at_once(world: World) -> None:
    engine = world.start()
    assert engine._tiers.objects is not None
    tier = engine._tiers.objects.tier
    (sequence,) = make_sequence_group(
        request("x", HISTORY), arrival=10**6, seed=1, max_total_tokens=120, added_s=0.0
    )
    keys = engine._tables.keys_to_find(sequence)
    assert tier.has(sequence, keys[1], 1)
    ask(engine)
    assert not tier.has(sequence, keys[1], 1)
    world.now_s += 11.0
    assert tier.has(sequence, keys[1], 1)
    assert not tier.has(sequence, keys[4], 4)  # half an object is none


def test_blocks_that_are_always_in_use_are_written_too(world: World) -> None:
    engine = world.start(idle_offload_s=10.0)
    for number in range(5):
        ask(engine, HISTORY[:64] + prompt(20 + number, 10))
        world.now_s += 6.0  # never idle for long enough to move to host memory
        engine.rest()
    world.rest(engine, 5.0)
    assert engine.stats().num_object_written_blocks >= 4
    assert ask(world.start(), HISTORY[:64] + prompt(40, 10))[1] == 64


def test_blocks_that_take_longer_to_read_are_computed(world: World) -> None:
    engine = world.start()
    ask(engine)
    world.rest(engine)
    other = world.start()
    other._tiers.arrivals._compute_s = lambda num_tokens: num_tokens * 1e-6
    assert ask(other)[1] == 0
    assert other.stats().num_absent_objects == 0  # the store was not asked
    other._tiers.arrivals._compute_s = lambda num_tokens: num_tokens * 0.1
    assert ask(world.start(), HISTORY)[1] == 64


def test_the_disk_is_preferred_and_the_store_has_the_rest(world: World, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_cache_path": str(tmp_path / "disk"), "idle_offload_s": 1.0}
    engine = world.start()
    expected, _ = ask(engine, HISTORY)
    world.rest(engine)
    # All but a beginning is in the store alone.
    one = world.start(**disk, object_cache_min_tokens=10**6)
    ask(one, HISTORY[:50])
    world.rest(one)
    assert one._tiers.disk is not None
    one._tiers.disk._file.close()
    both = world.start(**disk)
    assert ask(both) == (expected, 64)
    stats = both.stats()
    assert (stats.disk_hit_tokens, stats.object_hit_tokens) == (48, 16)
    assert (stats.num_read_blocks, stats.num_object_read_blocks) == (3, 1)
    both.check_integrity()
    assert both._tiers.disk is not None
    both._tiers.disk._file.close()


def test_a_slow_store_does_not_keep_the_disk_from_being_read(world: World, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk_cache_path": str(tmp_path / "disk"), "idle_offload_s": 1.0}
    one = world.start(**disk)
    expected, _ = ask(one, HISTORY)
    world.rest(one)
    assert one._tiers.disk is not None
    one._tiers.disk._file.close()
    both = world.start(**disk)
    both._tiers.arrivals._compute_s = lambda num_tokens: num_tokens * 5e-4
    # Two objects more that may be in the store: a look costs more than computing them.
    longer = HISTORY + prompt(50, 70)
    assert ask(both, longer)[1] == 80
    assert both.stats().num_absent_objects == 0
    assert ask(both)[0] == expected
    assert both._tiers.disk is not None
    both._tiers.disk._file.close()


def test_request_cancelled_while_blocks_are_read_leaves_nothing(world: World) -> None:
    engine, other = world.start(), world.start()
    expected, _ = ask(engine)
    world.rest(engine)
    other.add(request("gone", HISTORY))
    other.cancel("gone")
    drain(other)
    world.rest(other, 0.0)
    assert other.stats().num_used_host_blocks == 4
    assert ask(other) == (expected, 64)


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("faulty")  # without a fault
        return f"s3://{BUCKET}/{tmp_path.name}"
    return (tmp_path / "objects").as_uri()


def test_an_engine_of_a_worker_finds_them_after_a_restart(
    llama: tuple[Path, Any], url: str
) -> None:
    """The engine is made from settings, and the objects have their usual size."""
    token_ids = prompt(4, 300)
    settings: dict[str, Any] = {
        "num_blocks": 32,
        "device": "cpu",
        "object_cache_min_tokens": 256,
        "idle_offload_s": 0.0,
    }
    alone = Engine.load(llama[0], EngineConfig(**settings))
    expected, _ = ask(alone, token_ids)
    for found in (0, 256):
        engine = Engine.load(llama[0], EngineConfig(**settings, object_cache_url=url))
        assert ask(engine, token_ids) == (expected, found)
        while engine.rest() is not None:
            engine._bell.wait(0.01)
        engine.check_integrity()


@pytest.mark.parametrize("config", [{"prefix_cache": False}, {"host_cache_bytes": 0}])
def test_object_cache_needs_the_tiers_above_it(
    llama: tuple[Path, Any], config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"object_cache_url needs engine\.prefix_cache"):
        _load(llama[0], "file:///tmp/x", **config)


def test_random_weights_are_not_kept(llama: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="needs weights with a fingerprint"):
        _load(llama[0], "file:///tmp/x", load_format="dummy")


@pytest.mark.parametrize(
    "url", ["bucket", "s3://", "http://host/x", "file://relative", "s3://id:secret@bucket/x"]
)
def test_an_address_that_names_no_store_is_refused(llama: tuple[Path, Any], url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/path") as raised:
        _load(llama[0], url)
    assert "secret" not in str(raised.value)


def test_a_folder_that_cannot_be_made_is_refused(llama: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        _load(llama[0], (tmp_path / "file" / "objects").as_uri())


def _load(model: Path, url: str, **config: Any) -> None:
    Engine.load(model, EngineConfig(num_blocks=24, device="cpu", object_cache_url=url, **config))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("object_cache_min_tokens", 0),
        ("object_cache_requests", 0),
        ("object_cache_timeout_s", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        check_config(EngineConfig(**{name: value}))


def test_whole_blocks_are_needed() -> None:
    with pytest.raises(ConfigError, match="object_cache_url keeps whole blocks"):
        resolved(kernels="reference", tensor_parallel=2, object_cache_url="s3://b/p")
