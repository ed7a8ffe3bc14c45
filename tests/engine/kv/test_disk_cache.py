"""Idle conversations on disk: they come back after a restart with the same tokens, even if the file
is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kv.block_file import BlockFile, block_file
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence_group import make_sequence_group
from millrace.engine.step.settings import resolve
from millrace.engine.types import EngineOutput
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request

BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
HISTORY = prompt(1, 90)  # five blocks and a part


class World:
    """Engines one after the other on one folder, with a clock that is set by hand."""

    def __init__(self, model: Path, runner: ModelRunner, folder: Path) -> None:
        self.now_s = 0.0
        self.folder = folder
        self.model = model
        self._runner = runner
        self._engines: list[Engine] = []

    def start(self, **config: Any) -> Engine:
        """Start a process: the earlier one has ended, and its memory is gone."""
        self.end()
        settings = resolve(self.model, self.settings(**config))
        self._runner.cache.blocks.zero_()
        engine = Engine(self._runner, settings, monotonic=lambda: self.now_s)
        cache, exact = self._runner.cache, self._runner.is_row_exact
        engine.keep_on_disk(block_file(self.model, settings, cache, is_row_exact=exact))
        self._engines.append(engine)
        return engine

    def settings(self, **config: Any) -> EngineConfig:
        return EngineConfig(num_blocks=24, device="cpu", disk_cache_path=str(self.folder), **config)

    def end(self) -> None:
        for engine in self._engines:
            assert engine._tiers.disk is not None
            engine._tiers.disk._file.close()
        self._engines.clear()

    def rest(self, engine: Engine) -> None:
        """Let the engine be idle until all blocks are written."""
        self.now_s += 100.0
        deadline_s = time.monotonic() + 30.0
        while engine.rest() is not None:
            engine._bell.wait(0.01)
            assert time.monotonic() < deadline_s
        engine.check_integrity()


@pytest.fixture(scope="module")
def runner(llama: tuple[Path, Any]) -> ModelRunner:
    return ModelRunner.load(llama[0], resolved(llama[0], num_blocks=24, device="cpu"))


@pytest.fixture
def world(llama: tuple[Path, Any], runner: ModelRunner, tmp_path: Path) -> Iterator[World]:
    made = World(llama[0], runner, tmp_path / "kv")
    yield made
    made.end()


def _ask(engine: Engine, token_ids: list[int] = HISTORY, **fields: Any) -> tuple[Any, int]:
    """Run a request; return its tokens, and how many tokens of the prompt were found."""
    engine.add(request("r", token_ids, **fields))
    outputs: list[EngineOutput] = drain(engine)
    found = next(o for o in outputs if o.started).num_cached_tokens
    return tokens_by_request(outputs)["r"], found


def test_a_conversation_outlives_a_restart(world: World) -> None:
    engine = world.start()
    expected, found = _ask(engine)
    assert found == 0
    world.rest(engine)
    written = engine.stats()
    assert written.num_used_disk_blocks == written.num_written_blocks == 6
    engine = world.start()
    # Schedulers hear of it before anybody asks.
    changes = engine.pop_prefix_changes()
    assert changes is not None
    assert len(changes.added) == 6 * 8
    assert _ask(engine) == (expected, 80)
    stats = engine.stats()
    assert (stats.num_read_blocks, stats.num_unreadable_blocks) == (5, 0)
    engine.check_integrity()


def test_another_s_prompt_under_the_same_words_is_not_found(world: World) -> None:
    engine = world.start()
    _ask(engine, cache_salt="acme")
    world.rest(engine)
    engine = world.start()
    assert _ask(engine)[1] == 0
    assert _ask(engine, cache_salt="acme")[1] == 80


def test_blocks_of_other_weights_or_types_are_not_found(world: World) -> None:
    engine = world.start()
    _ask(engine)
    world.rest(engine)
    world.end()
    other = Engine.load(world.model, world.settings(kv_cache_dtype="int8"))
    assert _ask(other)[1] == 0
    assert len(list(world.folder.glob("*.kv"))) == 2
    # The same by way of the checkpoint, as a worker does it.
    again = Engine.load(world.model, world.settings())
    assert _ask(again)[1] == 80


@pytest.mark.parametrize("block", [0, 2, 4])
def test_what_is_damaged_is_computed(world: World, block: int) -> None:
    engine = world.start()
    expected, _ = _ask(engine)
    world.rest(engine)
    assert engine._tiers.disk is not None
    keys = engine._tables.keys_to_find(_sequence(engine))
    slot = engine._tiers.disk._slot_of[keys[block]]
    offset = engine._tiers.disk._file._offset(slot) + 200
    (path,) = world.folder.glob("*.kv")
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ 1]))
    engine = world.start()
    assert _ask(engine) == (expected, 16 * block)
    assert engine.stats().num_unreadable_blocks == 1
    engine.check_integrity()
    world.rest(engine)  # and written anew
    engine = world.start()
    assert _ask(engine) == (expected, 80)


def _sequence(engine: Engine) -> Any:
    (made,) = make_sequence_group(
        request("x", HISTORY), arrival=10**6, seed=1, max_total_tokens=120, added_s=0.0
    )
    return made


def test_a_disk_that_cannot_be_read_costs_no_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.start()
    expected, _ = _ask(engine)
    world.rest(engine)
    engine = world.start()

    def fails(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(BlockFile, "read", fails)
    assert _ask(engine) == (expected, 0)
    engine.check_integrity()


def test_a_disk_that_hangs_holds_up_a_prompt_for_a_while_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.start()
    expected, _ = _ask(engine)
    world.rest(engine)
    engine = world.start()
    assert engine._tiers.disk is not None
    tasks: list[Any] = []
    monkeypatch.setattr(engine._tiers.disk._readers, "submit", tasks.append)
    engine.add(request("r", HISTORY))
    assert engine.step() == []
    world.now_s += 3.0
    outputs = drain(engine)
    assert tokens_by_request(outputs)["r"] == expected
    # What comes too late is kept for others.
    for task in tasks:
        task()
    engine.step()
    engine.check_integrity()
    assert engine.stats().num_read_blocks == 5


def test_a_full_disk_ends_writing_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.start()

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFile, "write", fails)
    expected, _ = _ask(engine)
    world.rest(engine)
    assert caplog.text.count("writing the KV cache to disk failed") == 1
    assert _ask(engine) == (expected, 80)  # from host memory
    assert engine.stats().num_used_disk_blocks == 0
    engine.check_integrity()


def test_the_longest_unused_gives_way(world: World) -> None:
    slot_bytes = 4096 * -(-(40 + BLOCK_BYTES) // 4096)
    engine = world.start(disk_cache_bytes=4096 + 8 * slot_bytes)
    assert engine.stats().num_disk_blocks == 8
    for number in range(3):
        _ask(engine, prompt(number, 90))
        world.rest(engine)
    assert engine.stats().num_used_disk_blocks == 8
    engine = world.start(disk_cache_bytes=4096 + 8 * slot_bytes)
    assert [_ask(engine, prompt(number, 90))[1] for number in (0, 2)] == [0, 80]


def test_request_cancelled_while_blocks_are_read_leaves_nothing(world: World) -> None:
    engine = world.start()
    _ask(engine)
    world.rest(engine)
    engine = world.start()
    engine.add(request("gone", HISTORY))
    engine.cancel("gone")
    drain(engine)
    world.rest(engine)
    assert engine.stats().num_used_host_blocks == 5
    engine.check_integrity()


def test_several_completions_of_a_prompt_that_is_on_disk(world: World) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 5}
    engine = world.start()
    engine.add(request("r", HISTORY, **fields))
    expected = [(o.choice, o.token_ids) for o in drain(engine) if o.token_ids]
    world.rest(engine)
    engine = world.start()
    engine.add(request("r", HISTORY, **fields))
    assert sorted([(o.choice, o.token_ids) for o in drain(engine) if o.token_ids]) == sorted(
        expected
    )
    assert engine.stats().num_read_blocks == 5


@pytest.mark.parametrize("config", [{"prefix_cache": False}, {"host_cache_bytes": 0}])
def test_disk_cache_needs_the_tiers_above_it(world: World, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"disk_cache_path needs engine\.prefix_cache"):
        world.start(**config)


def test_random_weights_are_not_kept(world: World) -> None:
    with pytest.raises(ConfigError, match="needs weights with a fingerprint"):
        world.start(load_format="dummy")


def test_a_folder_that_cannot_be_written_is_refused(world: World) -> None:
    world.folder.parent.mkdir(exist_ok=True)
    world.folder.touch()
    with pytest.raises(ConfigError, match=r"disk_cache_path: .* cannot be used"):
        world.start()
    assert world.folder.is_file()


@pytest.mark.parametrize("is_written", [False, True])
def test_an_emptied_cache_finds_nothing_on_disk(world: World, is_written: bool) -> None:
    engine = world.start(host_cache_bytes=8 * BLOCK_BYTES, idle_offload_s=1.0)
    tokens, _ = _ask(engine)
    if is_written:
        world.rest(engine)
    else:
        world.now_s += 100.0
        engine.rest()
    engine.reset_prefix_cache()
    world.rest(engine)
    disk = engine._tiers.disk
    assert disk is not None
    assert (len(disk), list(disk)) == (0, [])
    assert _ask(engine) == (tokens, 0)
    world.rest(engine)
