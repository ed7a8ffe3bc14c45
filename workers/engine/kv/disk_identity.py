"""Which blocks on a disk an engine may use: those that it would have computed to the same bits."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

import torch

from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.engine.kv.block_file import BlockFile
from millrace.workers.engine.kv.cache import KVCache

_KERNELS = Path(__file__).parents[2] / "kernels"


def block_file(path: Path, config: EngineConfig, cache: KVCache) -> BlockFile:
    """The file of ``config`` for an engine of the checkpoint folder ``path``. Raises ConfigError if
    there can be none."""
    if not (config.prefix_cache and config.host_cache_bytes):
        raise ConfigError(
            "engine.disk_cache_path needs engine.prefix_cache, to find blocks again, and "
            "engine.host_cache_bytes, through which they come and go."
        )
    num_layers, _, layer_bytes = cache.blocks.shape
    return BlockFile(
        Path(config.disk_cache_path).expanduser(),
        _identity(path, config, cache),
        num_layers * layer_bytes,
        config.disk_cache_bytes,
    )


def _identity(path: Path, config: EngineConfig, cache: KVCache) -> str:
    """All that the bytes of a block depend on beside its tokens: the weights and what they are
    rounded to, the types, the device and what computes on it."""
    kernels = hashlib.sha256()
    for source in sorted(_KERNELS.rglob("*")):
        if source.suffix in (".py", ".h", ".cpp"):
            kernels.update(source.read_bytes())
    device = cache.blocks.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (
        weights_fingerprint(path, config.quantization, config.kv_cache_dtype),
        config.dtype,
        config.kernels,
        str(cache.data.dtype),
        f"{cache.block_size_tokens} tokens",
        name,
        torch.__version__,
        metadata.version("millrace"),
        kernels.hexdigest()[:16],
    )
    return ";".join(parts)
