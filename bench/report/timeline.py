"""A run by its time: rates, requests in flight and errors in short stretches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.bench.clients.exchange import UNFINISHED, ClientSample
from millrace.bench.report.derived import gaps_ms, tokens_by_part, ttft_ms
from millrace.bench.report.report import Bin

_Floats = npt.NDArray[np.float64]
_MAX_BINS = 60
_WIDTHS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)


class Parts(msgspec.Struct, frozen=True):
    """When the parts of all answers came, and the tokens of each."""

    at_s: _Floats
    tokens: _Floats


def parts_of(samples: Sequence[ClientSample]) -> Parts:
    """Of every request, whatever became of it."""
    times: list[_Floats] = []
    tokens: list[_Floats] = []
    for sample in samples:
        if sample.first_s is not None:
            later_s = np.cumsum(gaps_ms(sample)) / 1e3
            times.append(sample.first_s + np.concatenate([[0.0], later_s]))
            tokens.append(tokens_by_part(sample))
    if not times:
        return Parts(np.empty(0), np.empty(0))
    return Parts(np.concatenate(times), np.concatenate(tokens))


def timeline_of(samples: Sequence[ClientSample], parts: Parts, end_s: float) -> tuple[Bin, ...]:
    """From the start to the last end, in about 60 stretches at most."""
    last_s = max([end_s, *(sample.end_s for sample in samples)])
    width_s = next((w for w in _WIDTHS_S if last_s / w <= _MAX_BINS), _WIDTHS_S[-1])
    edges = np.arange(0.0, last_s + width_s, width_s)
    starts = np.array([sample.due_s for sample in samples])
    ends = np.array([sample.end_s for sample in samples])
    failed = np.array([sample.end_s for sample in samples if sample.error not in {"", UNFINISHED}])
    tokens, _ = np.histogram(parts.at_s, edges, weights=parts.tokens)
    arrived, _ = np.histogram(starts, edges)
    ended, _ = np.histogram(ends, edges)
    errors, _ = np.histogram(failed, edges)
    medians = _first_medians(samples, edges)
    bins = []
    for place, at_s in enumerate(edges[:-1].tolist()):
        covered_s = np.clip(ends, at_s, at_s + width_s) - np.clip(starts, at_s, at_s + width_s)
        bins.append(
            Bin(
                at_s=round(at_s, 3),
                width_s=width_s,
                tokens_per_s=float(tokens[place]) / width_s,
                arrivals_per_s=float(arrived[place]) / width_s,
                ends_per_s=float(ended[place]) / width_s,
                num_errors=int(errors[place]),
                in_flight=float(covered_s.sum()) / width_s,
                ttft_p50_ms=medians[place],
            )
        )
    return tuple(bins)


def _first_medians(samples: Sequence[ClientSample], edges: _Floats) -> list[float | None]:
    """The median TTFT of the answers that began in each stretch; None where none did."""
    by_bin: list[list[float]] = [[] for _ in range(len(edges) - 1)]
    for sample in samples:
        first_ms = ttft_ms(sample)
        if sample.first_s is None or first_ms is None:
            continue
        place = int(np.searchsorted(edges, sample.first_s, side="right")) - 1
        if 0 <= place < len(by_bin):
            by_bin[place].append(first_ms)
    return [round(float(np.median(values)), 3) if values else None for values in by_bin]
