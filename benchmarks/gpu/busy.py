"""Share of the time in which the device computes."""

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
# Gaps above this are attributed to the host: kernels of a recorded step follow faster.
_LATE_US = 5.0


class Busy(NamedTuple):
    """Summary of a trace of the device's kernels and copies, by the driver's timestamps.

    It has the seconds in which at least one ran, the seconds from the first to the last, and the
    seconds of gaps long enough to be caused by the host.
    """

    busy_s: float
    span_s: float
    late_s: float


def trace(device: torch.device, work: Callable[[], None]) -> Busy:
    """Trace ``work``; on a CPU, trace torch's operations in place of kernels."""
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
    """Return the union of (begin, end) in microseconds. Raises ValueError for no intervals."""
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
