"""Time to reload an idle conversation's blocks from disk or from an object store.

    python -m benchmarks.kv --only disk [--tokens 4096] [--folder DIR] [--stores] [--save]

  file     blocks of a cache with the shape of an 8B Llama's in bfloat16, read into host memory with
           their checksums, from the disk and from the system's page cache; beside one read of a
           file with as many bytes
  engine   the first token of a prompt of ``--tokens`` tokens whose blocks an earlier engine left on
           disk, beside computing it: a Llama of 100M parameters with random weights
  stores   with --stores: the same by an engine that never met the prompt, whose blocks another
           engine left in an object store: a folder, and a local S3 server in Python that shares the
           machine's cores

The goal: 4,096 tokens are back within 80 ms.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.support.command import PartResult
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.model import measured_model
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_BLOCK_TOKENS = 16
_LAYERS = 32
_BLOCK_BYTES_8B = _LAYERS * _BLOCK_TOKENS * 2 * 8 * 128 * 2
_IDLE_S = 1_000.0


class FileFigures(msgspec.Struct, kw_only=True):
    """Milliseconds of reads; ``cold`` is from the disk, ``warm`` from the page cache."""

    size_bytes: int
    cold_ms: float
    warm_ms: float
    plain_cold_ms: float
    plain_warm_ms: float


class EngineFigures(msgspec.Struct, kw_only=True):
    """Milliseconds to the first token: from the disk, from the page cache, and computed."""

    size_bytes: int
    cold_ms: float
    warm_ms: float
    computed_ms: float


class StoreFigures(msgspec.Struct, kw_only=True):
    """Milliseconds to the first token with blocks in an object store.

    Compares a prompt whose blocks are there, a prompt of the same length without blocks there, and
    ``computed`` without a look-up. Also the time of the writes behind it.
    """

    kind: str
    size_bytes: int
    num_objects: int
    found_ms: float
    absent_ms: float
    computed_ms: float
    written_ms: float


class Result(msgspec.Struct, kw_only=True):
    """Result of a run."""

    cpu: str
    tokens: int
    file: FileFigures
    engine: EngineFigures
    stores: list[StoreFigures] = []


def _forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _ms(work: Callable[[], object], before: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        before()
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times) * 1e3


def measure_file(folder: Path, num_tokens: int, repeats: int) -> FileFigures:
    """Measure blocks of an 8B Llama."""
    from millrace.engine.kv.block_file import BlockFile

    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    size_bytes = num_blocks * _BLOCK_BYTES_8B
    layer_bytes = _BLOCK_BYTES_8B // _LAYERS
    memory = bytearray(os.urandom(1 << 20) * -(-size_bytes // (1 << 20)))[:size_bytes]
    whole = memoryview(memory)

    def pieces(block: int) -> list[memoryview]:
        # In the cache's layout, a block's layers are not contiguous.
        at = (layer * num_blocks + block for layer in range(_LAYERS))
        return [whole[one * layer_bytes : (one + 1) * layer_bytes] for one in at]

    file = BlockFile(folder / "blocks", "8b", _BLOCK_BYTES_8B, 2 * size_bytes + (1 << 20))
    keys = [block.to_bytes(16, "big") for block in range(num_blocks)]
    for block, key in enumerate(keys):
        file.write(block, key, block, pieces(block))
    (folder / "plain").mkdir()
    plain = folder / "plain" / "file"
    plain.write_bytes(memory)

    def read() -> None:
        assert all(file.read(block, key, pieces(block)) for block, key in enumerate(keys))

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as opened:
            assert opened.readinto(memory) == size_bytes

    figures = FileFigures(
        size_bytes=size_bytes,
        cold_ms=_ms(read, lambda: _forget(folder / "blocks"), repeats),
        warm_ms=_ms(read, lambda: None, repeats),
        plain_cold_ms=_ms(read_plain, lambda: _forget(folder / "plain"), repeats),
        plain_warm_ms=_ms(read_plain, lambda: None, repeats),
    )
    file.close()
    return figures


def measure_engine(model: Path, folder: Path, num_tokens: int, repeats: int) -> EngineFigures:
    """Measure a conversation of the 100M Llama."""
    from millrace.engine.kv.block_file import block_file
    from millrace.engine.step.engine import Engine
    from millrace.engine.step.runners import load_runner
    from millrace.engine.step.settings import resolve

    settings = EngineConfig(device="cpu", disk_cache_path=str(folder), idle_offload_s=1.0)
    config = resolve(model, settings)
    runner = load_runner(model, config)
    source = random.Random(7)
    token_ids = tuple(source.randrange(runner.config.vocab_size) for _ in range(num_tokens))
    clock_s = 0.0
    engines: list[Engine] = []

    def restart() -> None:
        nonlocal clock_s
        for engine in engines:
            assert engine._tiers.disk is not None
            engine._tiers.disk._file.close()
        engines.clear()
        engine = Engine(runner, config, monotonic=lambda: clock_s + time.perf_counter())
        exact = runner.is_row_exact
        engine.keep_on_disk(block_file(model, config, runner.cache, is_row_exact=exact))
        engines.append(engine)

    def restart_cold() -> None:
        restart()
        _forget(folder)

    def restart_empty() -> None:
        for path in folder.iterdir():
            path.unlink()
        restart()

    def first_token() -> None:
        _first_token(engines[0], token_ids)

    restart()
    first_token()  # warms up
    computed_ms = _ms(first_token, restart_empty, repeats)
    clock_s += _IDLE_S
    while engines[0].rest() is not None:
        engines[0]._bell.wait(0.01)
    stats = engines[0].stats()
    figures = EngineFigures(
        size_bytes=stats.num_written_blocks * engines[0]._host_memory.block_bytes,
        cold_ms=_ms(first_token, restart_cold, repeats),
        warm_ms=_ms(first_token, restart, repeats),
        computed_ms=computed_ms,
    )
    assert engines[0].stats().num_read_blocks == (num_tokens - 1) // _BLOCK_TOKENS
    return figures


def _first_token(engine: Engine, prompt: tuple[int, ...]) -> None:
    from benchmarks.support.closed_loop import answers, greedy_request

    answers(engine, [greedy_request("r", prompt, 1)])


def measure_store(kind: str, url: str, model: Path, num_tokens: int, repeats: int) -> StoreFigures:
    """Measure a conversation of the 100M Llama, with one engine after another."""
    from millrace.engine.kv.objects.block_objects import block_objects
    from millrace.engine.step.engine import Engine
    from millrace.engine.step.runners import load_runner
    from millrace.engine.step.settings import resolve

    config = resolve(model, EngineConfig(device="cpu", object_cache_url=url, idle_offload_s=1.0))
    runner = load_runner(model, config)
    source = random.Random(7)

    def drawn() -> tuple[int, ...]:
        return tuple(source.randrange(runner.config.vocab_size) for _ in range(num_tokens))

    token_ids, engine, later_s = drawn(), Engine(runner, config), 0.0
    objects = block_objects(model, config, runner.cache, is_row_exact=runner.is_row_exact)

    def restart(*, looks: bool) -> None:
        nonlocal engine
        engine = Engine(runner, config, monotonic=lambda: later_s + time.perf_counter())
        if looks:
            engine._tiers.keep_in_store(objects, config)

    restart(looks=True)
    _first_token(engine, token_ids)
    later_s += _IDLE_S
    begin_s = time.perf_counter()
    while engine.rest() is not None:
        engine._bell.wait(0.01)
    written_ms = (time.perf_counter() - begin_s) * 1e3
    stats = engine.stats()
    figures = StoreFigures(
        kind=kind,
        size_bytes=stats.num_object_written_bytes,
        num_objects=stats.num_object_written_blocks // objects.num_blocks,
        found_ms=_ms(lambda: _first_token(engine, token_ids), lambda: restart(looks=True), repeats),
        absent_ms=_ms(lambda: _first_token(engine, drawn()), lambda: restart(looks=True), repeats),
        computed_ms=_ms(
            lambda: _first_token(engine, drawn()), lambda: restart(looks=False), repeats
        ),
        written_ms=written_ms,
    )
    assert stats.num_object_failures == 0
    return figures


def measure_stores(model: Path, folder: Path, num_tokens: int, repeats: int) -> list[StoreFigures]:
    """Measure a folder and an S3 server."""
    from benchmarks.support.s3_server import s3_server

    made = [measure_store("a folder", folder.as_uri(), model, num_tokens, repeats)]
    with s3_server() as url:
        made.append(measure_store("an S3 server", f"{url}/kv", model, num_tokens, repeats))
    return made


def run(
    tokens: int = 4096,
    folder: Path | None = None,
    repeats: int = 5,
    stores: bool = False,
    model: Path | None = None,
    threads: int = 0,
) -> PartResult:
    """Use files in ``folder``; report the median of ``repeats``; 0 threads means all cores."""
    with tempfile.TemporaryDirectory(dir=folder) as made, measured_model(model, threads) as path:
        folder = Path(made)
        (folder / "engine").mkdir()
        result = Result(
            cpu=cpu_name(),
            tokens=tokens,
            file=measure_file(folder, tokens, repeats),
            engine=measure_engine(path, folder / "engine", tokens - 100, repeats),
        )
        if stores:
            result.stores = measure_stores(path, folder / "store", tokens - 100, repeats)
    blocks, engine = result.file, result.engine
    print(result.cpu)
    print(
        f"  {tokens} tokens of an 8B shape, {blocks.size_bytes / 1e6:.0f} MB: from the disk "
        f"{blocks.cold_ms:.0f} ms (a plain read {blocks.plain_cold_ms:.0f}), from the page cache "
        f"{blocks.warm_ms:.0f} ms (a plain read {blocks.plain_warm_ms:.0f})"
    )
    print(
        f"  first token of {tokens - 100} tokens, 100M, {engine.size_bytes / 1e6:.0f} MB: "
        f"from the disk {engine.cold_ms:.0f} ms, from the page cache {engine.warm_ms:.0f} ms, "
        f"computed {engine.computed_ms:.0f} ms"
    )
    for store in result.stores:
        print(
            f"  the same from {store.kind}, {store.size_bytes / 1e6:.0f} MB in {store.num_objects} "
            f"objects: {store.found_ms:.0f} ms, looked for in vain {store.absent_ms:.0f} ms, "
            f"computed {store.computed_ms:.0f} ms; written within {store.written_ms:.0f} ms"
        )
    return PartResult(result, file="disk_reload_stores.json" if stores else "disk_reload.json")
