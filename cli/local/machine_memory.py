"""What the processes take of this machine's memory, and whether a model's weights fit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from millrace.runtime.process import available_bytes
from millrace.schemas.errors import MillraceError

_GIB = 1 << 30
# Of /proc/PID/stat, counted from the state.
_SESSION_FIELD = 3


class MemoryTooSmallError(MillraceError, code="memory_too_small"):
    """The weights alone are more than what is free."""


def check_memory(checkpoint: Path, num_workers: int, free_bytes: int | None = None) -> None:
    """Raises MemoryTooSmallError if the weights of so many workers do not fit into ``free_bytes``
    of main memory (None: what is free now). On a machine with a GPU, which holds them, the engine
    itself says what fits."""
    if has_gpu():
        return
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    free = available_bytes() if free_bytes is None else free_bytes
    if weights * num_workers > free:
        raise MemoryTooSmallError(
            f"the weights in {checkpoint} take {weights / _GIB:.1f} GiB for each of {num_workers} "
            f"worker{'s' * (num_workers > 1)}, and {free / _GIB:.1f} GiB of memory are free. Use "
            "fewer workers, a smaller model, or remove another one first."
        )


def memory_of_session(session: int) -> int:
    """Bytes that a process and all that it started take, if it leads a session of its own; what
    several share is divided among them."""
    total = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        # Processes end while we look.
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
    """Whether the driver of an NVIDIA device is there."""
    return Path("/dev/nvidiactl").exists()
