"""Measurements: the times of each request's tokens, and figures of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec


class RequestTimes(msgspec.Struct, frozen=True):
    """Times of one request in seconds on one clock: when it was sent, and each part's arrival.

    A part is one token, or as many as the system sent at once; ``num_tokens`` counts all.
    """

    sent_s: float
    parts_s: tuple[float, ...]
    num_tokens: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens per second; time to first token; time between the parts of an answer."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed, or 0."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


def p50_p99(values_ms: Sequence[float], form: str) -> str:
    """Format both percentiles in ms in the given form, as a part of a line."""
    p50_ms, p99_ms = percentile(values_ms, 0.5), percentile(values_ms, 0.99)
    return f"p50 {p50_ms:{form}} ms   p99 {p99_ms:{form}} ms"


def figures_of(requests: Sequence[RequestTimes]) -> Figures:
    """Return the figures of one run, from the first request sent to the last token."""
    begin_s = min(request.sent_s for request in requests)
    end_s = max(request.parts_s[-1] for request in requests)
    ttft_ms = [(request.parts_s[0] - request.sent_s) * 1e3 for request in requests]
    itl_ms = [gap_s * 1e3 for request in requests for gap_s in gaps_s(request)]
    return Figures(
        tokens_per_s=sum(request.num_tokens for request in requests) / (end_s - begin_s),
        ttft_p50_ms=percentile(ttft_ms, 0.5),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        itl_p50_ms=percentile(itl_ms, 0.5),
        itl_p99_ms=percentile(itl_ms, 0.99),
    )


def gaps_s(request: RequestTimes) -> list[float]:
    """Return the seconds between the parts of one answer."""
    return [later_s - earlier_s for earlier_s, later_s in pairwise(request.parts_s)]


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure over several runs."""
    return Figures(
        **{
            name: statistics.median(getattr(run, name) for run in runs)
            for name in Figures.__struct_fields__
        }
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells below their names: the first column left-aligned, others right."""
    lines = [names, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join(
        "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))).rstrip()
        for line in lines
    )
