"""Computation of a report from the samples of all processes."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.bench.clients.exchange import UNFINISHED, ClientSample
from millrace.bench.health import ProcessHealth
from millrace.bench.report.report import (
    SCHEMA,
    Bin,
    ClientHealth,
    Distribution,
    Goodput,
    LoadReport,
    MeasuredRequests,
    MeasuredThroughput,
    RequestSample,
    Tokens,
)
from millrace.bench.settings import LoadSettings, Slo

_Floats = npt.NDArray[np.float64]
_NUM_HISTOGRAM_BINS = 48
_HISTOGRAM_SHARE = 0.995
_MAX_CLIENT_DELAY_P99_MS = 20.0


def report_of(
    settings: LoadSettings,
    samples: Sequence[ClientSample],
    health: Sequence[ProcessHealth],
    stopped_s: float,
    started_at: datetime.datetime,
    *,
    interrupted: bool,
    keep_samples: bool,
) -> LoadReport:
    """Return the report of a run whose load ended ``stopped_s`` after its start."""
    ordered = sorted(samples, key=lambda sample: sample.due_s)
    begin_s = settings.warm_up_s
    end_s = _end_of(settings, ordered, stopped_s, interrupted=interrupted)
    measured_s = max(end_s - begin_s, 1e-9)
    sent = [sample for sample in ordered if begin_s <= sample.due_s]
    good = [sample for sample in sent if not sample.error]
    parts = parts_of(ordered)
    latencies = _latencies(settings, sent, good)
    return LoadReport(
        schema=SCHEMA,
        started_at=started_at.isoformat(timespec="seconds"),
        settings=settings.without_secrets(),
        interrupted=interrupted,
        measured_s=measured_s,
        requests=MeasuredRequests(
            num_sent=len(sent),
            num_succeeded=len(good),
            num_failed=sum(1 for sample in sent if sample.error not in {"", UNFINISHED}),
            num_unfinished=sum(1 for sample in sent if sample.error == UNFINISHED),
            num_warm_up=len(ordered) - len(sent),
        ),
        errors=dict(Counter(s.error for s in sent if s.error not in {"", UNFINISHED})),
        tokens=_tokens(good),
        throughput=_throughput(ordered, parts, begin_s, end_s),
        latencies=latencies,
        timeline=timeline_of(ordered, parts, max(end_s, stopped_s)),
        client=_client_health(settings, health, latencies),
        goodput=None if settings.slo is None else _goodput(settings.slo, sent, measured_s),
        samples=tuple(_request_sample(s) for s in sent) if keep_samples else (),
    )


def distribution_of(values: _Floats, weights: _Floats | None = None) -> Distribution:
    """Return the distribution of at least one value, each counted ``weights`` times (default:
    once)."""
    order = np.argsort(values)
    ordered = values[order]
    counts = np.ones_like(ordered) if weights is None else weights[order]
    reached = np.cumsum(counts)
    total = float(reached[-1])

    def at(share: float) -> float:
        place = np.searchsorted(reached, share * total * (1 - 1e-12))
        return float(ordered[min(int(place), len(ordered) - 1)])

    top = max(at(_HISTOGRAM_SHARE), ordered[0] + 1e-6)
    histogram, edges = np.histogram(
        ordered, bins=_NUM_HISTOGRAM_BINS, range=(float(ordered[0]), top), weights=counts
    )
    return Distribution(
        count=round(total),
        mean=float((ordered * counts).sum() / total),
        p50=at(0.5),
        p90=at(0.9),
        p95=at(0.95),
        p99=at(0.99),
        max=float(ordered[-1]),
        quantiles_ms=tuple(round(at(share / 100), 4) for share in range(101)),
        edges_ms=tuple(round(float(edge), 4) for edge in edges),
        histogram=tuple(round(float(count), 1) for count in histogram),
    )


def _end_of(
    settings: LoadSettings, ordered: Sequence[ClientSample], stopped_s: float, *, interrupted: bool
) -> float:
    """Return the end of the measured time."""
    if settings.duration_s is not None:
        planned_s = settings.warm_up_s + settings.duration_s
        return min(stopped_s, planned_s) if interrupted else planned_s
    if interrupted:
        return stopped_s
    return max((sample.end_s for sample in ordered), default=stopped_s)


def _latencies(
    settings: LoadSettings, sent: Sequence[ClientSample], good: Sequence[ClientSample]
) -> dict[str, Distribution]:
    """Return the latencies of successful requests, and the client's own delay of all sent
    requests."""
    gaps = [gaps_ms(sample) for sample in good]
    tokens = [tokens_by_part(sample)[1:] for sample in good]
    all_gaps = np.concatenate(gaps) if gaps else np.empty(0)
    all_tokens = np.concatenate(tokens) if tokens else np.empty(0)
    some = all_tokens > 0
    values: dict[str, tuple[_Floats, _Floats | None]] = {
        "ttft": (_of(ttft_ms, good), None),
        # Tokens that arrive together share their gap evenly.
        "itl": (all_gaps[some] / all_tokens[some], all_tokens[some]),
        "gap": (all_gaps, None),
        "tpot": (_of(tpot_ms, good), None),
        "e2e": (_of(e2e_ms, good), None),
    }
    if settings.rate_per_s is not None:
        values["client_delay"] = (_of(lambda s: (s.sent_s - s.due_s) * 1e3, sent), None)
    return {name: distribution_of(of, weights) for name, (of, weights) in values.items() if len(of)}


def _of(
    measure: Callable[[ClientSample], float | None], samples: Sequence[ClientSample]
) -> _Floats:
    values = [value for sample in samples if (value := measure(sample)) is not None]
    return np.array(values, dtype=np.float64)


def _tokens(good: Sequence[ClientSample]) -> Tokens:
    num_parts = sum(sample.num_parts for sample in good)
    num_output = sum(sample.num_output_tokens for sample in good)
    return Tokens(
        num_prompt=sum(sample.num_prompt_tokens for sample in good),
        num_cached=sum(sample.num_cached_tokens for sample in good),
        num_output=num_output,
        counted_by=_either([s.has_usage for s in good], "server", "parts"),
        parts_counted_by=_either([bool(s.part_tokens) for s in good], "server", "evenly"),
        tokens_per_part=num_output / num_parts if num_parts else 0.0,
    )


def _either(flags: Sequence[bool], if_all: str, if_none: str) -> str:
    if all(flags) and flags:
        return if_all
    return "mixed" if any(flags) else if_none


def _throughput(
    samples: Sequence[ClientSample], parts: Parts, begin_s: float, end_s: float
) -> MeasuredThroughput:
    span_s = max(end_s - begin_s, 1e-9)
    within = (parts.at_s >= begin_s) & (parts.at_s <= end_s)
    ended = sum(1 for s in samples if not s.error and begin_s <= s.end_s <= end_s)
    prompts = sum(
        s.num_prompt_tokens
        for s in samples
        if s.first_s is not None and begin_s <= s.first_s <= end_s
    )
    return MeasuredThroughput(
        requests_per_s=ended / span_s,
        output_tokens_per_s=float(parts.tokens[within].sum()) / span_s,
        prompt_tokens_per_s=prompts / span_s,
    )


def _goodput(slo: Slo, sent: Sequence[ClientSample], measured_s: float) -> Goodput:
    num_good = sum(1 for sample in sent if not sample.error and _keeps(slo, sample))
    return Goodput(
        slo=slo,
        num_good=num_good,
        requests_per_s=num_good / measured_s,
        share=num_good / len(sent) if sent else 0.0,
    )


def _keeps(slo: Slo, sample: ClientSample) -> bool:
    """Return whether a request meets the SLO. A request with a single part has no TPOT to miss; one
    without parts missed its TTFT."""
    first = ttft_ms(sample)
    bounds = (
        (slo.ttft_ms, float("inf") if first is None else first),
        (slo.tpot_ms, tpot_ms(sample) or 0.0),
        (slo.e2e_ms, e2e_ms(sample)),
    )
    return all(bound is None or value <= bound for bound, value in bounds)


def _client_health(
    settings: LoadSettings, health: Sequence[ProcessHealth], latencies: dict[str, Distribution]
) -> ClientHealth:
    reasons = [process.why_limited for process in health if process.why_limited]
    delay = latencies.get("client_delay")
    if settings.rate_per_s is not None and delay and delay.p99 > _MAX_CLIENT_DELAY_P99_MS:
        reasons.append(f"requests were sent up to {delay.p99:.0f} ms late (p99)")
    return ClientHealth(processes=tuple(health), why_limited="; ".join(dict.fromkeys(reasons)))


def _request_sample(sample: ClientSample) -> RequestSample:
    return RequestSample(
        index=sample.index,
        due_s=sample.due_s,
        client_delay_ms=(sample.sent_s - sample.due_s) * 1e3,
        ttft_ms=ttft_ms(sample),
        e2e_ms=e2e_ms(sample),
        status=sample.status,
        error=sample.error,
        num_prompt_tokens=sample.num_prompt_tokens,
        num_output_tokens=sample.num_output_tokens,
        gaps_ms=tuple(np.round(gaps_ms(sample), 3).tolist()),
        part_tokens=tuple(np.frombuffer(sample.part_tokens, dtype=np.int32).tolist()),
    )


_MAX_BINS = 60
_WIDTHS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0)


class Parts(msgspec.Struct, frozen=True):
    """Arrival times of the parts of all answers, and the tokens of each part."""

    at_s: _Floats
    tokens: _Floats


def parts_of(samples: Sequence[ClientSample]) -> Parts:
    """Return the parts of every request, also of failed ones."""
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
    """Return the run from the start to the last end, in at most about 60 bins."""
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
    """Return the median TTFT of the answers that began in each bin; None for a bin without
    answers."""
    by_bin: list[list[float]] = [[] for _ in range(len(edges) - 1)]
    for sample in samples:
        first_ms = ttft_ms(sample)
        if sample.first_s is None or first_ms is None:
            continue
        place = int(np.searchsorted(edges, sample.first_s, side="right")) - 1
        if 0 <= place < len(by_bin):
            by_bin[place].append(first_ms)
    return [round(float(np.median(values)), 3) if values else None for values in by_bin]


def ttft_ms(sample: ClientSample) -> float | None:
    """Return the time from the due time to the first part of the answer; None if no part came."""
    return None if sample.first_s is None else (sample.first_s - sample.due_s) * 1e3


def tpot_ms(sample: ClientSample) -> float | None:
    """Return the time from the first part to the last, divided by the tokens minus one; None with a
    single token."""
    if sample.num_output_tokens < 2 or not sample.num_parts:
        return None
    return float(gaps_ms(sample).sum()) / (sample.num_output_tokens - 1)


def e2e_ms(sample: ClientSample) -> float:
    """Return the time from the due time to the end of the answer."""
    return (sample.end_s - sample.due_s) * 1e3


def gaps_ms(sample: ClientSample) -> _Floats:
    """Return the times between the parts of the answer."""
    return np.frombuffer(sample.gaps_ms, dtype=np.float32).astype(np.float64)


def tokens_by_part(sample: ClientSample) -> _Floats:
    """Return the tokens of each part: as the server reports them, else the answer's tokens divided
    evenly."""
    if sample.part_tokens:
        return np.frombuffer(sample.part_tokens, dtype=np.int32).astype(np.float64)
    count = sample.num_parts
    return np.full(count, sample.num_output_tokens / count if count else 0.0)
