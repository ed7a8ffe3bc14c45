"""Identity of blocks: an engine may use another's blocks if it would compute them to the same
bits."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.cache import KVCache
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")
_KERNELS = Path(__file__).parents[1] / "kernels"


def block_identity(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> str:
    """Return everything that the bytes of blocks depend on, for an engine of the checkpoint folder
    ``path``.

    ``is_row_exact`` is that of its runner; it tells which products compute the blocks. Returns ""
    for random weights, which have no fingerprint.
    """
    if config.has_random_weights:
        return ""
    weights = weights_fingerprint(path, config.quantization, config.kv_cache_dtype)
    return weights and f"{weights};{_identity(config, cache)};own products: {is_row_exact}"


def kept_identity(
    setting: str, path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> str:
    """Return the identity of blocks that are kept beyond this process, as ``setting`` asks for.

    Raises ConfigError if they cannot be kept.
    """
    if not (config.prefix_cache and config.host_cache_bytes):
        raise ConfigError(
            f"engine.{setting} needs engine.prefix_cache, to find blocks again, and "
            "engine.host_cache_bytes, to copy them through."
        )
    identity = block_identity(path, config, cache, is_row_exact=is_row_exact)
    if not identity:
        raise ConfigError(
            f"engine.{setting} needs weights with a fingerprint, which random weights do not have; "
            "leave it out."
        )
    return identity


def transfer_identity(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> str:
    """Return the identity of blocks that workers exchange.

    With ``transfer_any_ranks`` it has what the meaning of the bytes depends on, and not what rounds
    them.
    """
    if not config.transfer_any_ranks:
        identity = block_identity(path, config, cache, is_row_exact=is_row_exact)
        num_layers, _, layer_bytes = cache.blocks.shape
        return f"{identity};{num_layers} layers of {layer_bytes} bytes"
    parts = (
        weights_fingerprint(path, config.quantization, config.kv_cache_dtype),
        str(cache.data.dtype),
        f"{cache.layout.scale_bytes} bytes of scales",
        f"{cache.block_size_tokens} tokens",
        metadata.version("millrace"),
        "of any ranks",
    )
    return ";".join(parts)


def _identity(config: ResolvedEngineConfig, cache: KVCache) -> str:
    """Return the rest of the identity: types, device, threads, versions and kernels."""
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
        f"ranks of {cache.part_layers} layers, experts whole: {config.expert_parallel}",
        torch.__version__,
        metadata.version("millrace"),
        kernels.hexdigest(),
    )
    return ";".join(parts)


def _processor() -> str:
    """Return the processor's instruction sets, for which products are compiled."""
    flags = [line for line in _CPUINFO.read_text().splitlines() if line.startswith("flags")][:1]
    return f"{platform.machine()} {flags}"
