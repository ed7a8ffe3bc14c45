"""HTML page of a simulation's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.bench.report.document import card, document, escape, figure, table
from millrace.bench.report.plots import Marker, PlotSeries, line_chart, number
from millrace.simulation.report.report import (
    Group,
    Percentiles,
    PolicyReport,
    SimulatedBin,
    SimulationReport,
)
from millrace.simulation.report.table import render, shown_at

# Line colours in the style sheet.
_COLOURS = "abcd"
_LAST_QUANTILE = 99
_LATENCIES = (
    ("ttft_ms", "Time to first token"),
    ("tpot_ms", "Time per output token"),
    ("e2e_ms", "Whole answer"),
)
_OVER_TIME = (
    ("num_waiting", "Requests that wait", "requests"),
    ("num_running", "Requests that run", "requests"),
    ("output_tokens_per_s", "Output tokens", "tokens/s"),
    ("num_workers", "Workers", "workers"),
)
_GROUP_COLUMNS = (
    *("milliseconds", "policy", "requests", "answered"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "E2E p99"),
)


def render_page(report: SimulationReport) -> str:
    """Return the whole document. Plots show the first four policies."""
    setup = report.setup
    lead = f"""<p>{setup.num_requests:,} requests of {setup.num_tenants:,} tenants in
{setup.last_arrival_s:,.0f} s, seed {setup.seed}</p>"""
    content = f"""<section class=cards>{"".join(_card(one) for one in report.policies)}</section>
<h2>Latencies</h2>
<section class=plots>{"".join(_latency(report, *one) for one in _LATENCIES)}</section>
<h2>Over time</h2>
<section class=plots>{_over_time(report)}</section>
{_groups("Tiers", report.policies, lambda one: one.by_tier)}
{_groups("Tenants", report.policies, lambda one: one.by_tenant)}
<h2>Figures</h2>
<div class=wide><pre>{escape(render(report))}</pre></div>"""
    title = f"Simulated: {', '.join(one.policy for one in report.policies)}"
    return document(title, lead, content, f"{report.schema} · millrace simulate")


def _card(one: PolicyReport) -> str:
    ttft = one.overall.ttft_ms
    shown = "-" if ttft is None else f"{number(ttft.p50)} ms"
    more = "no request was answered" if ttft is None else f"TTFT p50; p99 {number(ttft.p99)} ms"
    price = one.cost.per_1m_output_tokens
    cost = "" if price is None else f"{price:,.3f} {one.cost.currency} per 1M output tokens"
    return card(one.policy, shown, more, cost)


def _drawn(report: SimulationReport) -> list[tuple[PolicyReport, str]]:
    return list(zip(report.policies, _COLOURS, strict=False))


def _latency(report: SimulationReport, field: str, title: str) -> str:
    series, worst = [], 0.0
    for one, colour in _drawn(report):
        of: Percentiles | None = getattr(one.overall, field)
        if of is not None:
            shown = of.quantiles_ms[: _LAST_QUANTILE + 1]
            points = [(value, float(share)) for share, value in enumerate(shown)]
            series.append(PlotSeries(one.policy, points, colour))
            worst = max(worst, of.max)
    slo_ms = getattr(report.setup.slo, field, None)
    drawn = line_chart(
        series,
        x_title=f"milliseconds, up to p99 (max {number(worst)})",
        y_title="% at most",
        label=f"{title}: cumulative distribution",
        y_max=100.0,
        markers=[] if slo_ms is None else [Marker(slo_ms, f"SLO {number(slo_ms)}")],
    )
    return figure(title, drawn)


def _over_time(report: SimulationReport) -> str:
    figures = []
    for field, title, unit in _OVER_TIME:
        series = [
            PlotSeries(one.policy, _steps(one.timeline, field), colour, stepped=True)
            for one, colour in _drawn(report)
        ]
        figures.append(_chart(title, unit, series))
    first = [PlotSeries(one.policy, _first(one.timeline), colour) for one, colour in _drawn(report)]
    arrivals = [
        PlotSeries(one.policy, _steps(one.timeline, "arrivals_per_s"), colour, stepped=True)
        for one, colour in _drawn(report)[:1]
    ]
    figures.append(_chart("TTFT, median", "ms", first))
    figures.append(_chart("Arrivals", "requests/s", arrivals))
    return "".join(figures)


def _chart(title: str, unit: str, series: Sequence[PlotSeries]) -> str:
    label = f"{title} over time"
    return figure(title, line_chart(series, x_title="seconds", y_title=unit, label=label))


def _steps(timeline: Sequence[SimulatedBin], field: str) -> list[tuple[float, float]]:
    points = [(one.at_s, float(getattr(one, field))) for one in timeline]
    return [*points, (timeline[-1].at_s + timeline[-1].width_s, points[-1][1])] if points else []


def _first(timeline: Sequence[SimulatedBin]) -> list[tuple[float, float]]:
    return [
        (one.at_s + one.width_s / 2, one.ttft_p50_ms)
        for one in timeline
        if one.ttft_p50_ms is not None
    ]


def _groups(
    title: str,
    policies: Sequence[PolicyReport],
    groups: Callable[[PolicyReport], dict[str, Group]],
) -> str:
    """Return a table of groups; empty if there is only one."""
    names = list(dict.fromkeys(name for one in policies for name in groups(one)))
    if len(names) < 2:
        return ""
    rows = [
        (name, _cells(one.policy, group))
        for name in names
        for one in policies
        if (group := groups(one).get(name)) is not None
    ]
    return f"<h2>{title}</h2>" + table(rows, _GROUP_COLUMNS)


def _cells(policy: str, group: Group) -> list[str]:
    return [
        policy,
        f"{group.num_requests:,}",
        f"{group.num_done:,}",
        shown_at(group.ttft_ms, "p50"),
        shown_at(group.ttft_ms, "p99"),
        shown_at(group.tpot_ms, "p50"),
        shown_at(group.e2e_ms, "p99"),
    ]
