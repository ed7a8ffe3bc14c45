"""What a machine's memory and vector units could do at best."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from millrace.engine.threads.choice import leave_core

_SOURCE = Path(__file__).with_name("machine_rates.cpp")


class MachineRates(NamedTuple):
    """Of all threads: bytes read from memory per second, and FLOP/s by dot products of bfloat16
    pairs that read nothing, 0 where the CPU has no such vector instructions. AMX is not counted."""

    read_bytes_per_s: float
    product_flops: float


def machine_rates() -> MachineRates:
    """Needs the compiler ``c++``. Raises OSError without, CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "machine_rates")
        flags = ("-std=c++17", "-O2", "-march=native", "-fopenmp")
        subprocess.run(["c++", *flags, "-o", program, str(_SOURCE)], check=True)
        # Whoever measures may be bound to a core, which is not to bind what it starts.
        printed = subprocess.run(
            [program], check=True, capture_output=True, text=True, preexec_fn=leave_core
        )
    return MachineRates(*(float(line) for line in printed.stdout.split()))


def cpu_name() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if "model name" in line), "unknown")
