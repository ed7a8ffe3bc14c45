"""Time to pull blocks of another worker's KV cache instead of computing them.

    python -m benchmarks.kv --only pull [--tokens 4096] [--save]

  blocks   blocks of ``--tokens`` tokens, in the shapes of a 100M and an 8B Llama in bfloat16,
           pulled from another process: by mapped memory, by TCP with checksums, and by NIXL, whose
           UCX uses shared memory if there is any, or only TCP; beside a plain copy of as many bytes
           by one thread. The other process has an engine's cache, tables and server, but no model,
           and serves blocks like an idle engine. Blocks of a group of two ranks, also mapped, are
           re-sliced for one rank
  engine   the first token of a prompt of ``--tokens`` tokens whose blocks another worker's engine
           has, beside computing it: a Llama of 100M parameters with random weights, two processes

The goals: 70 % of the plain copy's rate, and 0.35 of the time to compute.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.checkpoints import LLAMA_8B, LLAMA_100M, LlamaShape
from benchmarks.kv.host import BLOCK_TOKENS, cache_of
from benchmarks.support.command import PartResult
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.model import measured_model
from benchmarks.support.processes import SPAWN
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.transfer import KvSource, TransferEndpoint

if TYPE_CHECKING:
    from millrace.engine.transfer.nixl_agent import NixlAgent
    from millrace.workers.process.engine_process import EngineClient

_LAYOUT = "blocks"
_TIMEOUT_S = 60.0


class BlockFigures(msgspec.Struct):
    """Rates in GB/s; ``first`` writes to untouched memory, over a new connection."""

    size_bytes: int
    mapped: float
    mapped_first: float
    tcp: float
    tcp_first: float
    nixl: float
    nixl_tcp: float
    resliced: float
    plain_copy: float


class EngineFigures(msgspec.Struct, kw_only=True):
    """Milliseconds to the first token: pulled, and computed."""

    size_bytes: int
    pulled_ms: float
    computed_ms: float


class Result(msgspec.Struct, kw_only=True):
    """Result of a run."""

    cpu: str
    tokens: int
    blocks_100m: BlockFigures
    blocks_8b: BlockFigures
    engine: EngineFigures


def _key(block: int) -> bytes:
    return block.to_bytes(16, "big")


def serve(pipe: Connection, shape: LlamaShape, num_blocks: int, num_ranks: int) -> None:
    """Run the other process: its cache, of ``num_ranks`` ranks, is full and idle.

    Ends when the pipe is closed.
    """
    import numpy as np

    from millrace.engine.kv.block_tables import BlockTables
    from millrace.engine.kv.host_cache import HostCache
    from millrace.engine.kv.host_memory import host_memory_of
    from millrace.engine.kv.tiers import Tiers
    from millrace.engine.threads.tasks import Bell

    cache = cache_of(shape, num_blocks, shared=True, num_ranks=num_ranks)
    memory = host_memory_of(cache, cache.blocks[:, 0].numel(), shared=True)
    tables = BlockTables(num_blocks, BLOCK_TOKENS, cache, host=HostCache(memory))
    blocks = cache.blocks.numpy()
    blocks[:] = np.random.default_rng(0).integers(0, 256, blocks.shape, dtype=np.uint8)
    for block in tables.pool.allocate(num_blocks) or ():
        tables.cached.insert(_key(block), block)
        tables.pool.free((block,))
    bell = Bell()
    tiers = Tiers(tables, cache, memory, lambda _: 0.0, bell.ring, time.perf_counter)
    tiers.exchange_with_peers(_LAYOUT, "127.0.0.1:0", transport="nixl")
    pipe.send(tiers.endpoint)
    while not pipe.poll():
        bell.wait(0.01)
        bell.clear()
        tiers.settle()
    assert tiers.exchange is not None
    tiers.exchange.close()


def measure_blocks(shape: LlamaShape, num_tokens: int, repeats: int) -> BlockFigures:
    """Measure blocks of a shape, from a process that has only these."""
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    size_bytes, copy = _plain_copy(shape, num_blocks)
    with _served(shape, num_blocks) as endpoint, _served(shape, num_blocks, 2) as of_two_ranks:
        elsewhere = msgspec.structs.replace(endpoint, host="elsewhere")
        works = [
            *(_pull(shape, one, num_blocks) for one in (endpoint, elsewhere, of_two_ranks)),
            *(_pull(shape, elsewhere, num_blocks, _agent(tls)) for tls in ("all", "tcp")),
            copy,
        ]
        # In turns, so that other load on the machine disturbs all of them.
        times = [[_seconds(work) for work in works] for _ in range(repeats + 1)]
    first = times[0]
    mapped, tcp, resliced, nixl, nixl_tcp, plain = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )
    times_s = (mapped, first[0], tcp, first[1], nixl, nixl_tcp, resliced, plain)
    return BlockFigures(size_bytes, *(size_bytes / one_s / 1e9 for one_s in times_s))


@contextmanager
def _served(shape: LlamaShape, num_blocks: int, num_ranks: int = 1) -> Iterator[TransferEndpoint]:
    """Start such a process; yield the endpoint at which it serves its blocks."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(theirs, shape, num_blocks, num_ranks), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join(_TIMEOUT_S)


def _seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


@cache
def _agent(tls: str) -> NixlAgent:
    """Create an agent whose UCX uses the transports ``tls``."""
    from millrace.engine.transfer.nixl_agent import NixlAgent

    os.environ["UCX_TLS"] = tls
    agent = NixlAgent([])
    del os.environ["UCX_TLS"]
    return agent


def _pull(
    shape: LlamaShape, endpoint: TransferEndpoint, num_blocks: int, agent: NixlAgent | None = None
) -> Callable[[], None]:
    """Return a function that pulls all blocks into its own memory, with an ``agent`` by NIXL."""
    from millrace.engine.kv.host_memory import host_memory_of
    from millrace.engine.transfer.addresses import this_host
    from millrace.engine.transfer.client import PullTarget
    from millrace.engine.transfer.memory import BlockShape
    from millrace.engine.transfer.peers import BlockSplit, Peers

    cache = cache_of(shape, 1, shared=True)
    memory = host_memory_of(cache, num_blocks * cache.blocks[:, 0].numel(), shared=True)
    slots = memory.slots()
    split = BlockSplit(endpoint.layout, cache.layout, cache.parts)
    peers = Peers(split, BlockShape(*slots.shape), this_host(), agent)
    target = PullTarget(slots, list(range(num_blocks)))
    keys = [_key(block) for block in range(num_blocks)]

    def pull() -> None:
        assert peers.pull(endpoint, keys, target, _TIMEOUT_S).num_blocks == num_blocks

    return pull


def _plain_copy(shape: LlamaShape, num_blocks: int) -> tuple[int, Callable[[], object]]:
    """Return the bytes of the blocks, and a copy of as many contiguous bytes by one thread."""
    size_bytes = num_blocks * cache_of(shape, 1).blocks[:, 0].numel()
    source, target = bytearray(size_bytes), bytearray(size_bytes)
    to, from_ = (
        ctypes.addressof((ctypes.c_char * size_bytes).from_buffer(one)) for one in (target, source)
    )

    def copy() -> None:
        assert len(source) == len(target)  # keeps references to both
        ctypes.memmove(to, from_, size_bytes)

    return size_bytes, copy


async def measure_engine(model: Path, num_tokens: int, repeats: int) -> EngineFigures:
    """Measure two workers' engines of one checkpoint."""
    from millrace.workers.process.engine_process import EngineClient

    # Both use the same products, without a choice by measurement.
    config = EngineConfig(device="cpu", kernels="native", transfer=True)
    source = await EngineClient.start(model, config, shared=False)
    other = await EngineClient.start(model, config, shared=False)
    try:
        generator = random.Random(7)
        await _first_token_ms(other, _prompt(generator, num_tokens))  # warms up
        computed, pulled = [], []
        for _ in range(repeats):
            prompt = _prompt(generator, num_tokens)
            computed.append(await _first_token_ms(other, _prompt(generator, num_tokens)))
            await _first_token_ms(source, prompt)
            before = other.stats.num_pulled_bytes
            pulled.append(await _first_token_ms(other, prompt, source.transfer_endpoint))
            size_bytes = other.stats.num_pulled_bytes - before
            assert size_bytes, "nothing was pulled"
    finally:
        await source.close()
        await other.close()
    return EngineFigures(
        size_bytes=size_bytes,
        pulled_ms=statistics.median(pulled),
        computed_ms=statistics.median(computed),
    )


def _prompt(generator: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(generator.randrange(LLAMA_100M.vocab_size) for _ in range(num_tokens))


async def _first_token_ms(
    client: EngineClient, prompt: tuple[int, ...], endpoint: TransferEndpoint | None = None
) -> float:
    from millrace.engine.types import EngineOutput, EngineRequest, EngineStats

    came: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def note(outputs: list[EngineOutput], _: EngineStats) -> None:
        if not came.done() and any(output.token_ids for output in outputs):
            came.set_result(time.perf_counter())

    client.on_outputs = note
    begin_s = time.perf_counter()
    client.add(
        EngineRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            kv_source=None
            if endpoint is None
            else KvSource(worker_id="source", endpoint=endpoint, num_tokens=len(prompt)),
        )
    )
    return (await came - begin_s) * 1e3


def _print(name: str, tokens: int, figures: BlockFigures) -> None:
    print(
        f"  {tokens} tokens of {name}, {figures.size_bytes / 1e6:.0f} MB: mapped "
        f"{figures.mapped:.1f} GB/s (the first time {figures.mapped_first:.1f}), by TCP "
        f"{figures.tcp:.1f} (the first time {figures.tcp_first:.1f}), by NIXL {figures.nixl:.1f} "
        f"(over TCP {figures.nixl_tcp:.1f}), re-sliced from two ranks {figures.resliced:.1f}, a "
        f"plain copy "
        f"{figures.plain_copy:.1f}: {figures.mapped / figures.plain_copy:.0%}"
    )


def run(
    tokens: int = 4096, repeats: int = 5, model: Path | None = None, threads: int = 0
) -> PartResult:
    """Report the median of ``repeats``; 0 threads means all cores."""
    with measured_model(model, threads) as path:
        result = Result(
            cpu=cpu_name(),
            tokens=tokens,
            blocks_100m=measure_blocks(LLAMA_100M, tokens, repeats),
            blocks_8b=measure_blocks(LLAMA_8B, tokens, repeats),
            engine=asyncio.run(measure_engine(path, tokens, repeats)),
        )
    engine = result.engine
    print(result.cpu)
    _print("a 100M shape", tokens, result.blocks_100m)
    _print("an 8B shape", tokens, result.blocks_8b)
    print(
        f"  first token of {tokens} tokens, 100M, {engine.size_bytes / 1e6:.0f} MB: pulled "
        f"{engine.pulled_ms:.0f} ms, computed {engine.computed_ms:.0f} ms: "
        f"{engine.pulled_ms / engine.computed_ms:.2f}"
    )
    return PartResult(result, file="kv_transfer.json")
