"""Memory use of the processes on this machine, and the check that a model's weights fit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from millrace.registry.checkpoints.checkpoint import gguf_parts
from millrace.runtime.process import available_bytes
from millrace.schemas.errors import MillraceError

_GIB = 1 << 30
# Index of the session in /proc/PID/stat, counted from the state.
_SESSION_FIELD = 3


class MemoryTooSmallError(MillraceError, code="memory_too_small"):
    """Error if the weights alone need more than the free memory."""


def check_memory(checkpoint: Path, num_workers: int, free_bytes: int | None = None) -> None:
    """Raise MemoryTooSmallError if the weights of ``num_workers`` workers exceed ``free_bytes`` of
    main memory (None: the memory that is free now).

    On a machine with a GPU, which holds the weights, the engine checks this itself.
    """
    if has_gpu():
        return
    files = gguf_parts(checkpoint) or checkpoint.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    free = available_bytes() if free_bytes is None else free_bytes
    if weights * num_workers > free:
        raise MemoryTooSmallError(
            f"the weights in {checkpoint} take {weights / _GIB:.1f} GiB for each of {num_workers} "
            f"worker{'s' * (num_workers > 1)}, and {free / _GIB:.1f} GiB of memory are free. Use "
            "fewer workers, a smaller model, or remove another one first."
        )


def memory_of_session(session: int) -> int:
    """Return the bytes of memory of a session: a process with all its descendants. Shared memory is
    divided among its users."""
    total = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # Processes may end during the loop.
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session:
                total += _proportional_bytes(process)
    return total


def _proportional_bytes(process: Path) -> int:
    for line in (process / "smaps_rollup").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "Pss":
            return int(size.split()[0]) * 1024
    return 0


def has_gpu() -> bool:
    """Return whether the driver of an NVIDIA device is present."""
    return Path("/dev/nvidiactl").exists()
