"""How much of a device's memory the KV cache gets."""

from __future__ import annotations

from millrace.engine.devices.cuda.device import MemoryInfo
from millrace.schemas.errors import ConfigError

_GIB = float(1 << 30)


def check_slots(info: MemoryInfo, *, num_slots: int, max_rank: int, slot_bytes: int) -> None:
    """Raise ConfigError, with the numbers, if slots for adapters do not fit beside the weights."""
    if num_slots * slot_bytes > info.free:
        raise ConfigError(
            f"engine.max_adapters: {num_slots} slots of {slot_bytes / _GIB:.2f} GiB each, for "
            f"adapters of ranks up to {max_rank}, do not fit into the {info.free / _GIB:.2f} GiB "
            f"that the device has left. Lower it, or engine.max_adapter_rank."
        )


def cache_bytes(info: MemoryInfo, *, fraction: float, work_bytes: int, block_bytes: int) -> int:
    """Bytes for the KV cache, so that it, all that is there now and the work of a step take
    ``fraction`` of the memory.

    ``work_bytes`` is what the largest step needs while it runs. It is set aside twice: recorded
    steps keep a pool of their own. Raises ConfigError, with the numbers, if not one block fits.
    """
    taken = info.total - info.free
    left = int(fraction * info.total) - taken - 2 * work_bytes
    if left >= block_bytes:
        return left
    raise ConfigError(
        f"The model does not fit: of the device's {info.total / _GIB:.2f} GiB, "
        f"engine.gpu_memory_fraction {fraction:g} gives {fraction * info.total / _GIB:.2f} GiB; "
        f"weights and buffers take {info.allocated / _GIB:.2f} GiB, others on the device "
        f"{(taken - info.allocated) / _GIB:.2f} GiB, the work of a step "
        f"{2 * work_bytes / _GIB:.2f} GiB, and one block of the KV cache needs "
        f"{block_bytes / _GIB:.4f} GiB. Raise the fraction, lower engine.max_batch_tokens or "
        f"engine.max_num_sequences, or serve a smaller model."
    )
