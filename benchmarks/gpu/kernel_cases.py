"""Measurement of one kernel: checked against its reference, timed beside its ceiling."""

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
# Size of the inputs that timed calls rotate among, in last-level caches, so that none stays cached.
_CACHES = 4
_MOST_SETS = 128
_LEAST_CALLS = 8
_REPLAYS = 20


class Timing(NamedTuple):
    """Seconds per call: the median, and the range from the fastest to the slowest run."""

    median_s: float
    spread_s: float


def num_sets(device: torch.device, bytes_per_set: int) -> int:
    """Return the number of input sets to rotate among, so that none stays in the cache."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = -(-_CACHES * cache_bytes // max(bytes_per_set, 1))
    return max(1, min(_MOST_SETS, wanted))


def timed(device: torch.device, calls: Sequence[Call], *, replays: int = _REPLAYS) -> Timing:
    """Time ``calls``, each of which works on inputs of its own.

    On CUDA they are recorded in one graph, so that launches cost no time, and replayed between two
    events; they must be capturable. On a CPU they are run directly.
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


# Relative errors explained by rounding to a dtype; a wrong tile or mask gives 0.1 or more.
BF16_ERROR = 1e-2
FP8_ERROR = 6e-2


class Work(NamedTuple):
    """Kernel on inputs of its own.

    ``run`` may be recorded in a graph, and ``written`` then returns its results. ``expected``
    computes them in float32 from the inputs before the run.
    """

    run: Callable[[], torch.Tensor | None]
    written: Callable[[torch.Tensor | None], Sequence[torch.Tensor]]
    expected: Callable[[], Sequence[torch.Tensor]]


def returned(result: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """Return the results of a kernel that returns a tensor of its own, for ``written``."""
    assert result is not None
    return [result]


class Cost(NamedTuple):
    """Minimum cost: bytes with each input read once and each output written once, and FLOPs."""

    bytes_moved: int
    flops: int = 0


class Tiles(NamedTuple):
    """Possible tiles of a kernel.

    ``choice`` maps names of functions of ``module``, which choose the tile, to their return values
    for a given tile.
    """

    module: ModuleType
    candidates: Sequence[tuple[Any, ...]]
    choice: Callable[[Any], dict[str, object]]

    @contextmanager
    def using(self, tile: tuple[Any, ...]) -> Iterator[None]:
        """Make the kernel's wrapper use ``tile``."""
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
    """Emit a row for the works that ``make`` builds from 0, 1, …; return None if it failed.

    ``bound_by`` is "bytes" or "flops". The ``error`` may be up to ``tolerance``. ``rival`` builds
    the same work for torch, timed beside it. A scope that sweeps times ``tiles`` instead, and skips
    kernels without tiles.
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
    """Compile the kernel. Its errors are reported when it is measured."""
    with suppress(Exception), tiles.using(tile) if tiles and tile else nullcontext():
        make(0).run()


def _best_tile(
    scope: Scope, tiles: Tiles, present: Timing, checked: Callable[[], tuple[float, Timing]]
) -> tuple[Timing, dict[str, Detail]]:
    """Return the fastest of all tiles, the present one included, and all times by name."""
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
    """Return the largest error of a work's results. Raises WrongResultError."""
    expected = [tensor.clone() for tensor in work.expected()]
    with poisoned_allocations():
        result = work.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # results may be in the host's memory
    actual = work.written(result)
    worst = max(error(one, other) for one, other in zip(actual, expected, strict=True))
    if not worst <= tolerance:
        raise WrongResultError(f"the error is {worst:.3g}, more than {tolerance}")
    return worst


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over that of ``expected``, or infinity for NaN."""
    wanted = expected.double()
    difference = (actual.to(expected.device).double() - wanted).norm().item()
    scale = wanted.norm().item()
    error = difference / scale if scale else difference
    return error if math.isfinite(error) else math.inf


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill memory that torch allocates inside with NaN, to reveal results that are never written.

    Integers get their largest value.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
