"""The file of an engine's blocks on a disk."""

from __future__ import annotations

from pathlib import Path

from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.engine.kv.block_file import BlockFile
from millrace.workers.engine.kv.block_identity import block_identity
from millrace.workers.engine.kv.cache import KVCache


def block_file(
    path: Path, config: EngineConfig, cache: KVCache, *, is_row_exact: bool
) -> BlockFile:
    """The file of ``config`` for an engine of the checkpoint folder ``path``; ``is_row_exact`` as
    its runner has it, which tells what was chosen for its products. Raises ConfigError if there can
    be none."""
    if not (config.prefix_cache and config.host_cache_bytes):
        raise ConfigError(
            "engine.disk_cache_path needs engine.prefix_cache, to find blocks again, and "
            "engine.host_cache_bytes, through which they come and go."
        )
    identity = block_identity(path, config, cache, is_row_exact=is_row_exact)
    if not identity:
        raise ConfigError(
            "engine.disk_cache_path is for weights that can be told from others, which random ones "
            "cannot."
        )
    num_layers, _, layer_bytes = cache.blocks.shape
    return BlockFile(
        Path(config.disk_cache_path).expanduser(),
        identity,
        num_layers * layer_bytes,
        config.disk_cache_bytes,
    )
