"""How much of the time the device computes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_WORK = ("cpu_op",)
# Longer than from one kernel of a recorded step to the next: there the host was late.
_LATE_US = 5.0


class Busy(NamedTuple):
    """Of a trace of the device's kernels and copies, by the driver's own timestamps: seconds in
    which at least one ran, seconds from the first to the last, and what of it were gaps so long
    that the host must have been late."""

    busy_s: float
    span_s: float
    late_s: float


def trace(device: torch.device, work: Callable[[], None]) -> Busy:
    """Trace ``work``; on a CPU torch's operations are traced, in the place of kernels."""
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]
    if on_device:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        work()
        if on_device:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = _DEVICE_WORK if on_device else _HOST_WORK
    return busy_of(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in kinds
    )


def busy_of(intervals_us: Iterable[tuple[float, float]]) -> Busy:
    """The union of (begin, end) in microseconds. Raises ValueError if there are none."""
    ordered = sorted(intervals_us)
    if not ordered:
        raise ValueError("the trace has nothing that ran on the device")
    first_us, until_us = ordered[0]
    busy_us, late_us = until_us - first_us, 0.0
    for begin_us, end_us in ordered[1:]:
        gap_us = begin_us - until_us
        if gap_us > _LATE_US:
            late_us += gap_us
        busy_us += max(0.0, end_us - max(begin_us, until_us))
        until_us = max(until_us, end_us)
    return Busy(busy_us / 1e6, (until_us - first_us) / 1e6, late_us / 1e6)
