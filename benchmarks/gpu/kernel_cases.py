"""One kernel, checked against its reference and timed beside its ceiling."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu.report import Detail
from benchmarks.gpu.scope import Scope, WrongResultError, describe, is_fatal

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


# Relative errors that rounding to a dtype explains; a wrong tile or mask shows as 0.1 and more.
BF16_ERROR = 1e-2
FP8_ERROR = 6e-2


class Work(NamedTuple):
    """A kernel on inputs of its own. ``run`` may be recorded in a graph, ``written`` then has its
    results. ``expected`` computes them from the inputs as they are before, in float32."""

    run: Callable[[], torch.Tensor | None]
    written: Callable[[torch.Tensor | None], Sequence[torch.Tensor]]
    expected: Callable[[], Sequence[torch.Tensor]]


def returned(result: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """``written`` of a kernel that returns a tensor of its own."""
    assert result is not None
    return [result]


class Cost(NamedTuple):
    """What must be moved and computed at least: each input read once, each output written once."""

    bytes_moved: int
    flops: int = 0


class Tiles(NamedTuple):
    """Tiles that a kernel may have. ``choice`` maps names of functions of ``module``, which choose
    the tile, to what they return for one."""

    module: ModuleType
    candidates: Sequence[tuple[Any, ...]]
    choice: Callable[[Any], dict[str, object]]

    @contextmanager
    def using(self, tile: tuple[Any, ...]) -> Iterator[None]:
        """Have the kernel's wrapper take ``tile``."""
        functions: dict[str, Any] = {
            name: _always(choice) for name, choice in self.choice(tile).items()
        }
        with patch.multiple(self.module, **functions):
            yield


def _always(choice: object) -> Callable[..., object]:
    return lambda *_, **__: choice


def measure(
    scope: Scope,
    name: str,
    make: Callable[[int], Work],
    cost: Cost,
    *,
    bound_by: str = "bytes",
    tolerance: float = BF16_ERROR,
    error: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
    rival: Callable[[int], Call] | None = None,
    tiles: Tiles | None = None,
) -> Timing | None:
    """Emit a row for the works that ``make`` makes of numbers 0, 1, …; None if it failed.

    ``bound_by``: "bytes" or "flops". ``error`` of what is written and expected may be up to
    ``tolerance``. ``rival`` makes the same work for torch, timed beside it. A scope that sweeps
    times ``tiles`` instead, and nothing of a kernel without them.
    """
    timing = None
    if scope.sweeps and (tiles is None or not scope.sweeps_kernel(name)):
        return timing
    if scope.rehearsal is not None:
        for tile in tiles.candidates if scope.sweeps and tiles else [None]:
            if scope.rehearsal.take():
                _rehearse(make, tiles, tile)
        return timing
    if scope.out_of_time(name):
        return timing
    with scope.case(name):
        count = num_sets(scope.device, cost.bytes_moved)

        def checked() -> tuple[float, Timing]:
            worst = check(make(0), tolerance, error or relative_error)
            return worst, timed(scope.device, [make(i).run for i in range(count)])

        worst, timing = checked()
        details: dict[str, Detail] = {
            "us": timing.median_s * 1e6,
            "spread_us": timing.spread_s * 1e6,
            "error": worst,
            "input_sets": count,
        }
        if scope.sweeps and tiles is not None:
            timing, swept = _best_tile(scope, tiles, timing, checked)
            details |= swept
        elif rival is not None:
            torch_s = timed(scope.device, [rival(i) for i in range(count)]).median_s
            details |= {
                "torch_us": torch_s * 1e6,
                "note": f"torch {torch_s / timing.median_s:.2f}x",
            }
        if bound_by == "bytes":
            rate, ceiling, unit = cost.bytes_moved / 1e9, scope.ceilings.bytes_per_s / 1e9, "GB/s"
        else:
            rate, ceiling, unit = cost.flops / 1e12, scope.ceilings.flops / 1e12, "TFLOP/s"
        scope.emit(name, rate / timing.median_s, unit, ceiling=ceiling, details=details)
    return timing


def _rehearse(make: Callable[[int], Work], tiles: Tiles | None, tile: Any) -> None:
    """Have the kernel compiled. What is wrong with it shows when it is measured."""
    with suppress(Exception), tiles.using(tile) if tiles and tile else nullcontext():
        make(0).run()


def _best_tile(
    scope: Scope, tiles: Tiles, present: Timing, checked: Callable[[], tuple[float, Timing]]
) -> tuple[Timing, dict[str, Detail]]:
    """The fastest of all tiles, the present one included, and the times of all by their names."""
    times: dict[str, Detail] = {}
    best, name = present, "the present one"
    for tile in tiles.candidates[:2] if scope.smoke else tiles.candidates:
        try:
            with tiles.using(tile):
                _, timing = checked()
        except Exception as error:
            if is_fatal(error):
                raise
            times[str(tuple(tile))] = describe(error)
            continue
        times[str(tuple(tile))] = timing.median_s * 1e6
        if timing.median_s < best.median_s:
            best, name = timing, str(tuple(tile))
    note = f"{name}: {present.median_s / best.median_s:.2f}x of the present tile"
    return best, {"best_us": best.median_s * 1e6, "note": note, **times}


def check(
    work: Work,
    tolerance: float,
    error: Callable[[torch.Tensor, torch.Tensor], float],
) -> float:
    """The largest error of what a work writes. Raises WrongResultError."""
    expected = [tensor.clone() for tensor in work.expected()]
    with poisoned_allocations():
        result = work.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # it may have written the host's memory
    actual = work.written(result)
    worst = max(error(one, other) for one, other in zip(actual, expected, strict=True))
    if not worst <= tolerance:
        raise WrongResultError(f"the error is {worst:.3g}, more than {tolerance}")
    return worst


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of ``expected``; infinite if anything is no number."""
    wanted = expected.double()
    difference = (actual.to(expected.device).double() - wanted).norm().item()
    scale = wanted.norm().item()
    error = difference / scale if scale else difference
    return error if math.isfinite(error) else math.inf


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Memory that torch allocates inside is filled with NaN, so that what is never written shows;
    integers get their largest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
