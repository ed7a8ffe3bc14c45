"""Ceilings of a machine's memory and vector units."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from millrace.engine.threads.choice import leave_core

_SOURCE = Path(__file__).with_name("machine_rates.cpp")


class MachineRates(NamedTuple):
    """Rates of all threads.

    They are the bytes read from memory per second, and the FLOP/s of dot products of bfloat16 pairs
    without reads, 0 if the CPU lacks such instructions. AMX is not counted.
    """

    read_bytes_per_s: float
    product_flops: float


def machine_rates() -> MachineRates:
    """Measure; needs the compiler ``c++``. Raises OSError or CalledProcessError on failure."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "machine_rates")
        flags = ("-std=c++17", "-O2", "-march=native", "-fopenmp")
        subprocess.run(["c++", *flags, "-o", program, str(_SOURCE)], check=True)
        # The caller may be bound to a core, which must not bind the child.
        printed = subprocess.run(
            [program], check=True, capture_output=True, text=True, preexec_fn=leave_core
        )
    return MachineRates(*(float(line) for line in printed.stdout.split()))


def cpu_name() -> str:
    """Return the kernel's name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if "model name" in line), "unknown")
