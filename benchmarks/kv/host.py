"""Time to reload an idle conversation's blocks from host memory.

    python -m benchmarks.kv --only host [--tokens 4096]

The cache has the shape of an 8B Llama's in bfloat16: 32 layers, 8 key heads of 128. Blocks are
copied out and in as by the engine, contiguous and scattered, beside one plain copy of as many
bytes. The goal: 4,096 tokens are back within 50 ms, if memory bandwidth permits.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpoints import LLAMA_8B, LlamaShape, config_of
from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.host_memory import PlainHostMemory
from millrace.engine.models.shard import block_part
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config

BLOCK_TOKENS = 16


def cache_of(
    shape: LlamaShape, num_blocks: int, *, shared: bool = False, num_ranks: int = 1
) -> KVCache:
    """Create a bfloat16 cache on the CPU for a group of ranks.

    ``shared`` puts it in pages that other processes can map.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(shape)))
        config = read_model_config(Path(folder))
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    cache = KVCache(
        shard_config(config, shards[0]),
        num_blocks=num_blocks,
        block_size_tokens=BLOCK_TOKENS,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        shared=shared,
        part_layers=(config.num_hidden_layers,) * num_ranks,
    )
    cache.parts = tuple(block_part(config, shard) for shard in shards)
    return cache


_GOAL_MS = 50


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    work()  # touches the memory
    return statistics.median(timeit.repeat(work, number=1, repeat=repeats)) * 1e3


def run(tokens: int = 4096, repeats: int = 7) -> None:
    """Report the median of ``repeats``."""
    num_blocks = -(-tokens // BLOCK_TOKENS)
    cache = cache_of(LLAMA_8B, num_blocks)
    memory = PlainHostMemory(cache, num_blocks * cache.data[:, 0].numel() * cache.data.itemsize)
    size_bytes = num_blocks * memory.block_bytes
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    plain_ms = _median_ms(lambda: target.copy_(source), repeats)
    print(
        f"{tokens} tokens of {size_bytes / tokens / 1024:.0f} KiB: a plain copy of "
        f"{size_bytes / 1e6:.0f} MB takes {plain_ms:.1f} ms "
        f"({2 * size_bytes / plain_ms / 1e6:.1f} GB/s read and written)"
    )
    side_by_side = list(range(num_blocks))
    scattered = random.Random(0).sample(side_by_side, num_blocks)
    for name, blocks in (("side by side", side_by_side), ("scattered", scattered)):
        out_ms = _median_ms(partial(memory.store, blocks, side_by_side), repeats)
        in_ms = _median_ms(partial(memory.load, side_by_side, blocks), repeats)
        print(
            f"  {name:12}  out {out_ms:6.1f} ms, back {in_ms:6.1f} ms, {in_ms / plain_ms:.2f}x the "
            f"plain copy (goal for 4096 tokens: at most {_GOAL_MS} ms)"
        )
