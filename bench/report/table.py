"""Report on the terminal, and two reports side by side."""

from __future__ import annotations

from millrace.bench.report.report import METRICS, LoadReport
from millrace.bench.settings import LoadSettings
from millrace.runtime.text_table import text_table

TITLES = {
    "ttft": "TTFT",
    "itl": "ITL (per token)",
    "gap": "gap between parts",
    "tpot": "TPOT",
    "e2e": "E2E",
    "client_delay": "client's own delay",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def render(report: LoadReport) -> str:
    """Render the whole report, ending with a line break."""
    blocks = ["\n".join(_summary(report)) + "\n", _latencies(report)]
    if said := notes(report):
        blocks.append("\n".join(said) + "\n")
    return "\n".join(blocks)


def load_in_words(settings: LoadSettings) -> str:
    """Describe the load in one line."""
    if settings.rate_per_s is not None:
        shape = "" if settings.burstiness == 1 else f", burstiness {settings.burstiness:g}"
        how = f"open loop, {settings.rate_per_s:g} requests/s{shape}"
    else:
        how = f"closed loop, {settings.concurrency} clients"
    prompts = f"{settings.input_tokens} tokens in"
    if settings.dataset:
        prompts = f"prompts of {settings.dataset}"
    elif settings.shared_prefix_tokens:
        prompts += f" ({settings.shared_prefix_tokens} shared)"
    return f"{how}; {prompts}, up to {settings.output_tokens} out"


def notes(report: LoadReport) -> list[str]:
    """Return the caveats of the report, one sentence each."""
    said = []
    if report.interrupted:
        said.append("The run was ended early; requests that were running then are left out.")
    if report.requests.num_unfinished and not report.interrupted:
        said.append(
            f"{report.requests.num_unfinished} requests were unfinished when the run ended; "
            "latencies cover the finished requests, which are the faster ones."
        )
    if report.tokens.counted_by != "server":
        said.append("The server reported no usage: each part of an answer counts as one token.")
    elif report.tokens.parts_counted_by != "server" and report.tokens.tokens_per_part > 1.01:
        said.append(
            f"A part of an answer held {report.tokens.tokens_per_part:.2f} tokens on average; the "
            "API does not report the tokens of each part, so ITL assumes an even spread."
        )
    if report.client.why_limited:
        said.append(
            f"The client may have been the limit: {report.client.why_limited}. Use more "
            "--processes, or another machine."
        )
    return said


def _summary(report: LoadReport) -> list[str]:
    settings, requests, tokens = report.settings, report.requests, report.tokens
    rates = report.throughput
    counts = (
        f"{requests.num_sent} sent, {requests.num_succeeded} succeeded, "
        f"{requests.num_failed} failed, {requests.num_unfinished} unfinished"
    )
    amounts = f"{tokens.num_prompt:,} in ({tokens.num_cached:,} cached), {tokens.num_output:,} out"
    throughput = (
        f"{rates.requests_per_s:,.2f} requests/s, {rates.output_tokens_per_s:,.1f} output "
        f"tokens/s, {rates.prompt_tokens_per_s:,.1f} prompt tokens/s"
    )
    rows = [
        ("server", f"{settings.url}  {settings.api.value}  {settings.model}"),
        ("load", load_in_words(settings)),
        ("measured", f"{report.measured_s:.1f} s after {settings.warm_up_s:g} s of warm-up"),
        ("requests", counts),
        ("tokens", amounts),
        ("throughput", throughput),
    ]
    if report.goodput is not None:
        good = report.goodput
        share = f"{good.requests_per_s:,.2f} requests/s ({good.share:.1%} of those sent)"
        rows.append(("goodput", f"{share} within {slo_in_words(report)}"))
    for code, count in sorted(report.errors.items(), key=lambda item: -item[1]):
        rows.append(("error", f"{count} of {code}"))
    processes = report.client.processes
    shares = ", ".join(f"{one.cpu_share:.0%}" for one in processes)
    lag_ms = max(one.lag_p99_ms for one in processes)
    rows.append(("client", f"CPU of each process {shares}; loop late by p99 {lag_ms:.1f} ms"))
    return [f"{name:<12}{value}" for name, value in rows]


def slo_in_words(report: LoadReport) -> str:
    """Describe the SLO, as in ``TTFT 200 ms, TPOT 50 ms``; empty without an SLO."""
    slo = report.settings.slo
    if slo is None:
        return ""
    bounds = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} {bound:g} ms" for name, bound in bounds if bound is not None)


def _latencies(report: LoadReport) -> str:
    rows = [
        (title, *(f"{getattr(of, name):,.2f}" for name in _COLUMNS), f"{of.count:,}")
        for name, title in TITLES.items()
        if (of := report.latencies.get(name)) is not None
    ]
    names = ("milliseconds", *_COLUMNS, "count")
    return text_table(names, rows, [name != "milliseconds" for name in names])


_PERCENTILES = ("p50", "p90", "p99")
# A smaller relative difference is not marked.
_SAME = 0.005


def render_comparison(before: LoadReport, after: LoadReport) -> str:
    """Render a table of the metrics in both reports, with the change in per cent; ends with a line
    break."""
    lines = []
    for name, report in (("before", before), ("after", after)):
        settings = report.settings
        lines.append(
            f"{name:<8}{report.started_at}  {settings.url}  {settings.api.value}  {settings.model}"
        )
        lines.append(f"{'':<8}{load_in_words(settings)}")
    if different := _differing_settings(before, after):
        lines.append(f"settings that differ: {', '.join(different)}")
    names = ("", "before", "after", "change")
    rows = [_row(title, old, new) for title, old, new in _figures(before, after)]
    return "\n".join([*lines, "", text_table(names, rows, [name != "" for name in names])])


def _figures(before: LoadReport, after: LoadReport) -> list[tuple[str, float, float]]:
    rows = [
        (
            "requests/s",
            before.throughput.requests_per_s,
            after.throughput.requests_per_s,
        ),
        (
            "output tokens/s",
            before.throughput.output_tokens_per_s,
            after.throughput.output_tokens_per_s,
        ),
        ("failed", float(before.requests.num_failed), float(after.requests.num_failed)),
    ]
    if before.goodput is not None and after.goodput is not None:
        rows.append(
            ("goodput, requests/s", before.goodput.requests_per_s, after.goodput.requests_per_s)
        )
    for name in METRICS:
        old, new = before.latencies.get(name), after.latencies.get(name)
        if old is None or new is None:
            continue
        rows += [
            (f"{TITLES[name]} {share}, ms", getattr(old, share), getattr(new, share))
            for share in _PERCENTILES
        ]
    return rows


def _row(title: str, old: float, new: float) -> tuple[str, str, str, str]:
    if old == new or (old and abs(new / old - 1) < _SAME):
        change = "="
    else:
        change = f"{new / old - 1:+.1%}" if old else "new"
    return title, f"{old:,.2f}", f"{new:,.2f}", change


def _differing_settings(before: LoadReport, after: LoadReport) -> list[str]:
    """Return the fields in which the two loads differ."""
    learnt = {"tokens_per_word", "tokens_around"}
    return [
        name
        for name in before.settings.__struct_fields__
        if name not in learnt and getattr(before.settings, name) != getattr(after.settings, name)
    ]
