"""How long work on the device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]
# Of the input that timed calls rotate among, so that none of it is still in the last level's cache.
_CACHES = 4
_MOST_SETS = 128
_LEAST_CALLS = 8
_REPLAYS = 20


class Timing(NamedTuple):
    """Seconds a call: the median, and how far the fastest and slowest of the runs lie apart."""

    median_s: float
    spread_s: float


def num_sets(device: torch.device, bytes_per_set: int) -> int:
    """How many sets of inputs timed calls have to rotate among to find none of it in the cache."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-_CACHES * cache_bytes // max(bytes_per_set, 1))
    return max(1, min(_MOST_SETS, wanted))


def timed(device: torch.device, calls: Sequence[Call], *, replays: int = _REPLAYS) -> Timing:
    """Time ``calls``, each of which works on inputs of its own.

    On CUDA they are recorded in one graph, so that nobody waits for launches, and replayed between
    two events; they must be capturable. On a CPU they just run.
    """
    if device.type != "cuda":
        return _timed_on_cpu(calls)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        calls[0]()
    torch.cuda.synchronize(device)
    repeated = [calls[i % len(calls)] for i in range(max(len(calls), _LEAST_CALLS))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in repeated:
            call()
    for _ in range(2):
        graph.replay()
    return _timed_by_events(graph.replay, len(repeated), replays)


def _timed_by_events(run: Callable[[], None], num_calls: int, replays: int) -> Timing:
    pairs = []
    torch.cuda.synchronize()
    for _ in range(replays):
        begin, end = _event(), _event()
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return _timing([begin.elapsed_time(end) / 1e3 / num_calls for begin, end in pairs])


def _timed_on_cpu(calls: Sequence[Call]) -> Timing:
    begin_s = time.perf_counter()
    calls[0]()
    return _timing([time.perf_counter() - begin_s])


def _timing(times_s: Sequence[float]) -> Timing:
    return Timing(statistics.median(times_s), max(times_s) - min(times_s))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
