"""Two reports side by side."""

from __future__ import annotations

from millrace.bench.report.report import METRICS, LoadReport
from millrace.bench.report.table import TITLES, load_in_words
from millrace.runtime.text_table import text_table

_PERCENTILES = ("p50", "p90", "p99")
# Below this a difference is not worth a sign.
_SAME = 0.005


def render_comparison(before: LoadReport, after: LoadReport) -> str:
    """A table of what both measured, with the change in per cent; ends with a line break."""
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
    """The fields in which the two loads were not the same."""
    learnt = {"tokens_per_word", "tokens_around"}
    return [
        name
        for name in before.settings.__struct_fields__
        if name not in learnt and getattr(before.settings, name) != getattr(after.settings, name)
    ]
