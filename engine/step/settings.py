"""The engine's settings, with what they leave to the device decided."""

from __future__ import annotations

import msgspec
import torch

from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError

# Two cores compute 384 rows at the best rate, each of 512 takes a fifth longer.
_CPU_SEQUENCES, _CPU_TOKENS, _CPU_CACHE_BYTES = 64, 384, 1 << 30
_CPU_ADAPTERS = 20
# A GPU's weights are read once a step for however many sequences, and a few thousand rows keep
# its matrix units busy.
_CUDA_SEQUENCES, _CUDA_TOKENS = 256, 4096


def with_device_defaults(config: EngineConfig, device: torch.device) -> EngineConfig:
    """``config`` without zeros that stand for a choice by the device; a KV cache that is sized by
    the device's memory stays 0."""
    on_cuda = device.type == "cuda"
    return msgspec.structs.replace(
        config,
        max_num_sequences=config.max_num_sequences
        or (_CUDA_SEQUENCES if on_cuda else _CPU_SEQUENCES),
        max_batch_tokens=config.max_batch_tokens or (_CUDA_TOKENS if on_cuda else _CPU_TOKENS),
        kv_cache_bytes=config.kv_cache_bytes or (0 if on_cuda else _CPU_CACHE_BYTES),
    )


def num_adapter_slots(config: EngineConfig, *, takes_adapters: bool) -> int:
    """How many adapters are in memory at a time. Raises ConfigError for some where none are
    applied."""
    if config.max_adapters and not takes_adapters:
        raise ConfigError(
            "engine.max_adapters: this engine's runner takes no adapters; leave it out."
        )
    if config.max_adapters is None:
        return _CPU_ADAPTERS if takes_adapters else 0
    return config.max_adapters


def speculates(config: EngineConfig, *, is_row_exact: bool, on_device: bool) -> bool:
    """Whether tokens are proposed: on a device that chooses tokens by itself only if that is asked
    for. Raises ConfigError where they would change what is drawn."""
    if config.speculation in ("off", False):
        return False
    if config.speculation is None:
        return is_row_exact and not on_device
    if not is_row_exact:
        raise ConfigError(
            "engine.speculation: several tokens of a sequence are computed in one step, bit for "
            "bit as one by one, by the compiled kernels of a CPU in bfloat16 and by those of a GPU "
            "with engine.deterministic, without experts only; leave it out or set it to off."
        )
    return True


def choose_device(name: str) -> torch.device:
    """The device by name; for "auto" a GPU if there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device is {name!r}; choose auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {name!r}, but this machine has no CUDA device.")
    return device


def has_parted_blocks(config: EngineConfig) -> bool:
    """Whether the ranks of a group have a part of each block in memory of their own: those of GPUs
    and of other hosts have, while those of a CPU have one cache in memory that all of them map."""
    if config.tensor_parallel * config.pipeline_parallel == 1:
        return False
    return bool(config.remote_stages) or has_device_ranks(config)


def has_device_ranks(config: EngineConfig) -> bool:
    """Whether it is a group of ranks with a device each that is told what to do."""
    if config.tensor_parallel * config.pipeline_parallel == 1:
        return False
    return config.kernels in ("triton", "reference") or choose_device(config.device).type == "cuda"


def check_parted_blocks(config: EngineConfig) -> None:
    """Raise ConfigError where whole blocks are to be kept or lent and there are only parts."""
    for name in ("disk_cache_path", "object_cache_url"):
        if getattr(config, name) and has_parted_blocks(config):
            raise ConfigError(
                f"engine.{name} keeps whole blocks, of which each rank of this group has a part in "
                "memory of its own; leave it out."
            )
