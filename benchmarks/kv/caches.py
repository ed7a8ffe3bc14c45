"""KV caches of models that are not there, for what moves blocks and computes nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from benchmarks.checkpoints import LlamaShape, config_of
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.shard import Shard, block_part, shard_config
from millrace.registry.checkpoints.checkpoint import read_model_config

BLOCK_TOKENS = 16


def cache_of(
    shape: LlamaShape, num_blocks: int, *, shared: bool = False, num_ranks: int = 1
) -> KVCache:
    """In bfloat16 on the CPU, of a group of so many ranks; ``shared``: in pages that other
    processes may map."""
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
