"""Report as one page of HTML."""

from __future__ import annotations

import msgspec

from millrace.bench.report.document import card, document, escape, figure, table
from millrace.bench.report.plots import Marker, PlotSeries, bar_chart, line_chart, number
from millrace.bench.report.report import Distribution, LoadReport
from millrace.bench.report.table import TITLES, load_in_words, notes, slo_in_words

_PLOTTED = ("ttft", "itl", "e2e")
_LONG_TITLES = {
    "ttft": "Time to first token",
    "itl": "Time between tokens",
    "e2e": "Whole answer",
}
_PERCENTILES = ("p50", "p90", "p95", "p99")
_LAST_QUANTILE = 99


def render_page(report: LoadReport) -> str:
    """Return the whole document."""
    settings = report.settings
    lead = f"""<p>{escape(load_in_words(settings))}</p>
<p class=dim>{escape(settings.url)} · {settings.api.value} · {report.started_at} ·
{report.measured_s:.1f} s measured after {settings.warm_up_s:g} s of warm-up</p>"""
    said = "".join(f"<p class=note>{escape(note)}</p>" for note in notes(report))
    content = f"""{said}
<section class=cards>{_cards(report)}</section>
<h2>Latencies</h2>
<section class=plots>{_latency_plots(report)}</section>
<h2>Over time</h2>
<section class=plots>{_timeline_plots(report)}</section>
<h2>Percentiles</h2>
{_percentile_table(report)}
{_error_table(report)}
<h2>Settings</h2>
{_settings_table(report)}"""
    title = f"{settings.model or settings.url} under load"
    return document(title, lead, content, f"{report.schema} · millrace bench")


def _cards(report: LoadReport) -> str:
    requests = report.requests
    cards = [
        ("output tokens/s", number(report.throughput.output_tokens_per_s), ""),
        ("requests/s", number(report.throughput.requests_per_s), f"{requests.num_sent:,} sent"),
    ]
    for name in _PLOTTED:
        of = report.latencies.get(name)
        if of is not None:
            cards.append((TITLES[name], f"{number(of.p50)} ms", f"p99 {number(of.p99)} ms"))
    if report.goodput is not None:
        cards.append(
            (
                "goodput",
                f"{report.goodput.share:.1%}",
                f"{number(report.goodput.requests_per_s)} requests/s within {slo_in_words(report)}",
            )
        )
    failed = f"{requests.num_unfinished} unfinished" if requests.num_unfinished else ""
    cards.append(("failed", f"{requests.num_failed:,}", failed))
    return "".join(card(*one) for one in cards)


def _latency_plots(report: LoadReport) -> str:
    bounds = report.settings.slo
    figures = []
    for name in _PLOTTED:
        of = report.latencies.get(name)
        if of is None:
            continue
        slo_ms = getattr(bounds, f"{name}_ms", None) if bounds is not None else None
        figures.append(figure(_LONG_TITLES[name], _cdf(_LONG_TITLES[name], of, slo_ms)))
        figures.append(figure(f"{_LONG_TITLES[name]}, spread", _histogram(name, of)))
    return "".join(figures)


def _cdf(title: str, of: Distribution, slo_ms: float | None) -> str:
    shown = of.quantiles_ms[: _LAST_QUANTILE + 1]
    markers = [Marker(of.p50, f"p50 {number(of.p50)}"), Marker(of.p99, f"p99 {number(of.p99)}")]
    if slo_ms is not None:
        markers.append(Marker(slo_ms, f"SLO {number(slo_ms)}"))
    return line_chart(
        [PlotSeries(title, [(value, float(share)) for share, value in enumerate(shown)])],
        x_title=f"milliseconds, up to p99 (max {number(of.max)})",
        y_title="% at most",
        label=f"{title}: cumulative distribution",
        y_max=100.0,
        markers=markers,
    )


def _histogram(name: str, of: Distribution) -> str:
    return bar_chart(
        of.edges_ms,
        of.histogram,
        x_title="milliseconds, up to p99.5",
        y_title="tokens" if name == "itl" else "requests",
        label=f"{_LONG_TITLES[name]}: histogram",
        markers=[Marker(of.p50, "p50")],
    )


def _timeline_plots(report: LoadReport) -> str:
    bins = report.timeline
    if not bins:
        return ""
    warm_up_s = report.settings.warm_up_s
    end_s = bins[-1].at_s + bins[-1].width_s

    def chart(title: str, y_title: str, *series: PlotSeries) -> str:
        drawn = line_chart(
            series,
            x_title="seconds",
            y_title=y_title,
            label=f"{title} over time",
            x_max=end_s,
            shaded_until=warm_up_s,
        )
        return figure(title, drawn)

    def line(name: str, field: str, colour: str, *, filled: bool = False) -> PlotSeries:
        points = [(one.at_s, float(getattr(one, field))) for one in bins]
        points.append((end_s, points[-1][1]))
        return PlotSeries(name, points, colour, stepped=True, filled=filled)

    first = [(b.at_s + b.width_s / 2, b.ttft_p50_ms) for b in bins if b.ttft_p50_ms is not None]
    errors = ""
    if any(one.num_errors for one in bins):
        errors = chart("Errors", "errors", line("errors", "num_errors", "d", filled=True))
    return "".join(
        (
            chart("Output tokens", "tokens/s", line("tokens/s", "tokens_per_s", "a", filled=True)),
            chart(
                "Requests",
                "requests/s",
                line("sent", "arrivals_per_s", "b"),
                line("ended", "ends_per_s", "a"),
            ),
            chart("In flight", "requests", line("in flight", "in_flight", "c", filled=True)),
            chart("TTFT, median", "ms", PlotSeries("TTFT", first, "b")),
            errors,
        )
    )


def _percentile_table(report: LoadReport) -> str:
    columns = ("mean", *_PERCENTILES, "max")
    rows = [
        (title, [*(f"{getattr(of, column):,.2f}" for column in columns), f"{of.count:,}"])
        for name, title in TITLES.items()
        if (of := report.latencies.get(name)) is not None
    ]
    return table(rows, ("milliseconds", *columns, "count"))


def _error_table(report: LoadReport) -> str:
    if not report.errors:
        return ""
    most_first = sorted(report.errors.items(), key=lambda item: -item[1])
    return "<h2>Errors</h2>" + table([(code, [f"{count:,}"]) for code, count in most_first])


def _settings_table(report: LoadReport) -> str:
    settings = report.settings
    rows = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if value in (None, "", (), {}) or name == "slo":
            continue
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if isinstance(value, dict):
            shown = msgspec.json.encode(value).decode()
        rows.append((name, [shown]))
    if slo := slo_in_words(report):
        rows.append(("slo", [slo]))
    for place, process in enumerate(report.client.processes):
        shown = (
            f"CPU {process.cpu_share:.0%}, loop late by {process.lag_p50_ms:.1f} ms (p50), "
            f"{process.lag_p99_ms:.1f} ms (p99), {process.lag_max_ms:.1f} ms (max)"
        )
        rows.append((f"load process {place + 1}", [shown]))
    return table(rows, kind="text")
