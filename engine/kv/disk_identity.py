"""The file of an engine's blocks on a disk."""

from __future__ import annotations

from pathlib import Path

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_file import BlockFile
from millrace.engine.kv.block_identity import kept_identity
from millrace.engine.kv.cache import KVCache


def block_file(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> BlockFile:
    """The file of ``config`` for an engine of the checkpoint folder ``path``; ``is_row_exact`` as
    its runner has it, which tells what was chosen for its products. Raises ConfigError if there can
    be none."""
    assert config.disk_cache_path is not None
    identity = kept_identity("disk_cache_path", path, config, cache, is_row_exact=is_row_exact)
    num_layers, _, layer_bytes = cache.blocks.shape
    return BlockFile(
        Path(config.disk_cache_path).expanduser(),
        identity,
        num_layers * layer_bytes,
        config.disk_cache_bytes,
    )
