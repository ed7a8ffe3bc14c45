"""Which blocks on a disk an engine may use: those that it would have computed to the same bits."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import torch

from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.engine.kv.block_file import BlockFile
from millrace.workers.engine.kv.cache import KVCache

_CPUINFO = Path("/proc/cpuinfo")
_KERNELS = Path(__file__).parents[2] / "kernels"


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
    weights = weights_fingerprint(path, config.quantization, config.kv_cache_dtype)
    if not weights or config.load_format == "dummy":
        raise ConfigError(
            "engine.disk_cache_path is for weights that can be told from others, which random ones "
            "cannot."
        )
    num_layers, _, layer_bytes = cache.blocks.shape
    return BlockFile(
        Path(config.disk_cache_path).expanduser(),
        f"{weights};{_identity(config, cache)};own products: {is_row_exact}",
        num_layers * layer_bytes,
        config.disk_cache_bytes,
    )


def _identity(config: EngineConfig, cache: KVCache) -> str:
    """What else the bytes of a block depend on: the types, the device and what computes on it."""
    kernels = hashlib.sha256()
    for source in sorted(_KERNELS.rglob("*")):
        if source.suffix in (".py", ".h", ".cpp"):
            kernels.update(source.read_bytes())
    device = cache.blocks.device
    parts = (
        config.dtype,
        config.kernels,
        str(cache.data.dtype),
        f"{cache.block_size_tokens} tokens",
        torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        f"{torch.get_num_threads()} threads",
        torch.__version__,
        metadata.version("millrace"),
        kernels.hexdigest(),
    )
    return ";".join(parts)


def _processor() -> str:
    """What its instructions are, which products are compiled for."""
    flags = [line for line in _CPUINFO.read_text().splitlines() if line.startswith("flags")][:1]
    return f"{platform.machine()} {flags}"
