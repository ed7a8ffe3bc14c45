"""What it takes to bring an idle conversation's blocks back from disk after a restart, or to find
them in an object store.

    python -m benchmarks.disk_reload [--tokens 4096] [--folder DIR] [--stores] [--save]

  file     blocks of a cache with the shape of an 8B Llama's in bfloat16, read into host memory with
           their checksums, from the disk and from the system's page cache, beside reading as many
           bytes of a file in one piece
  engine   the first token of a prompt of so many tokens whose blocks an engine before had left on
           disk, beside computing it: a Llama of 100M parameters with random weights
  stores   with --stores: the same by an engine that has never met the prompt, whose blocks another
           has left in an object store: a folder, and an S3 server on this machine, which is written
           in Python and shares its cores

The goal: 4,096 tokens come back within 80 ms.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.support.command import command_parser, write_json
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.model import add_model_arguments, measured_model
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams

_RESULT = Path(__file__).parent / "results" / "disk_reload.json"
_STORES_RESULT = _RESULT.with_name("disk_reload_stores.json")
_BLOCK_TOKENS = 16
_LAYERS = 32
_BLOCK_BYTES_8B = _LAYERS * _BLOCK_TOKENS * 2 * 8 * 128 * 2
_IDLE_S = 1_000.0


class FileFigures(msgspec.Struct, kw_only=True):
    """Milliseconds; ``cold`` is from the disk, ``warm`` from the page cache."""

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
    """Milliseconds to the first token of blocks in a store of some kind, and of a prompt of as many
    tokens that is looked for in vain, beside those that ``computed`` without a look takes; how long
    writing took behind it."""

    kind: str
    size_bytes: int
    num_objects: int
    found_ms: float
    absent_ms: float
    computed_ms: float
    written_ms: float


class Result(msgspec.Struct, kw_only=True):
    """What a run measured."""

    cpu: str
    tokens: int
    file: FileFigures
    engine: EngineFigures
    stores: list[StoreFigures] = []


def _forget(folder: Path) -> None:
    """Have the system drop what it has of the files."""
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
    """Blocks of an 8B Llama."""
    from millrace.engine.kv.block_file import BlockFile

    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    size_bytes = num_blocks * _BLOCK_BYTES_8B
    layer_bytes = _BLOCK_BYTES_8B // _LAYERS
    memory = bytearray(os.urandom(1 << 20) * -(-size_bytes // (1 << 20)))[:size_bytes]
    whole = memoryview(memory)

    def pieces(block: int) -> list[memoryview]:
        # In the cache's layout the layers of a block lie apart.
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
    """A conversation of the 100M Llama."""
    from millrace.engine.kv.disk_identity import block_file
    from millrace.engine.step.engine import Engine
    from millrace.engine.step.runners import load_runner
    from millrace.engine.step.settings import resolve
    from millrace.engine.types import EngineRequest

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

    def first_token() -> None:
        (engine,) = engines
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add(EngineRequest(request_id="r", prompt_token_ids=token_ids, sampling=sampling))
        while engine.has_work:
            engine.step()

    restart()
    first_token()  # what is only done once is done
    computed_ms = _ms(first_token, restart_without(folder, restart), repeats)
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


def restart_without(folder: Path, restart: Callable[[], None]) -> Callable[[], None]:
    """A restart that finds nothing."""

    def again() -> None:
        for path in folder.iterdir():
            path.unlink()
        restart()

    return again


def measure_store(kind: str, url: str, model: Path, num_tokens: int, repeats: int) -> StoreFigures:
    """A conversation of the 100M Llama, with one engine after the other."""
    from millrace.engine.kv.objects.opening import block_objects
    from millrace.engine.step.engine import Engine
    from millrace.engine.step.runners import load_runner
    from millrace.engine.step.settings import resolve
    from millrace.engine.types import EngineRequest

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

    def first_token(prompt: tuple[int, ...]) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add(EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work:
            engine.step()

    restart(looks=True)
    first_token(token_ids)
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
        found_ms=_ms(lambda: first_token(token_ids), lambda: restart(looks=True), repeats),
        absent_ms=_ms(lambda: first_token(drawn()), lambda: restart(looks=True), repeats),
        computed_ms=_ms(lambda: first_token(drawn()), lambda: restart(looks=False), repeats),
        written_ms=written_ms,
    )
    assert stats.num_object_failures == 0
    return figures


def measure_stores(model: Path, folder: Path, num_tokens: int, repeats: int) -> list[StoreFigures]:
    """A folder and an S3 server."""
    from benchmarks.support.s3_server import s3_server

    made = [measure_store("a folder", folder.as_uri(), model, num_tokens, repeats)]
    with s3_server() as url:
        made.append(measure_store("an S3 server", f"{url}/kv", model, num_tokens, repeats))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("disk_reload", __doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements; the median counts")
    parser.add_argument("--stores", action="store_true", help="measure object stores, too")
    parser.add_argument("--save", action="store_true", help="write the result file")
    add_model_arguments(parser)
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=parsed.folder) as made, measured_model(parsed) as model:
        folder = Path(made)
        (folder / "engine").mkdir()
        result = Result(
            cpu=cpu_name(),
            tokens=parsed.tokens,
            file=measure_file(folder, parsed.tokens, parsed.repeats),
            engine=measure_engine(model, folder / "engine", parsed.tokens - 100, parsed.repeats),
        )
        if parsed.stores:
            result.stores = measure_stores(
                model, folder / "store", parsed.tokens - 100, parsed.repeats
            )
    blocks, engine = result.file, result.engine
    print(result.cpu)
    print(
        f"  {parsed.tokens} tokens of an 8B shape, {blocks.size_bytes / 1e6:.0f} MB: from the disk "
        f"{blocks.cold_ms:.0f} ms (a plain read {blocks.plain_cold_ms:.0f}), from the page cache "
        f"{blocks.warm_ms:.0f} ms (a plain read {blocks.plain_warm_ms:.0f})"
    )
    print(
        f"  first token of {parsed.tokens - 100} tokens, 100M, {engine.size_bytes / 1e6:.0f} MB: "
        f"from the disk {engine.cold_ms:.0f} ms, from the page cache {engine.warm_ms:.0f} ms, "
        f"computed {engine.computed_ms:.0f} ms"
    )
    for store in result.stores:
        print(
            f"  the same from {store.kind}, {store.size_bytes / 1e6:.0f} MB in {store.num_objects} "
            f"objects: {store.found_ms:.0f} ms, looked for in vain {store.absent_ms:.0f} ms, "
            f"computed {store.computed_ms:.0f} ms; written within {store.written_ms:.0f} ms"
        )
    file = _STORES_RESULT if parsed.stores else _RESULT
    write_json(file if parsed.save else None, result)


if __name__ == "__main__":
    main()
