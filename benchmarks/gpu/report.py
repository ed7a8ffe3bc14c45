"""What was measured, beside what bounds it and what it is to reach."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.gpu.goals import goals_of

Detail = float | int | str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ``ceiling`` is in the same ``unit``; ``share`` of it is reached, for times the
    ceiling over the value. A ``failure`` says why there is no figure, or why it does not count."""

    section: str
    name: str
    value: float | None = None
    unit: str = ""
    ceiling: float | None = None
    share: float | None = None
    failure: str = ""
    details: dict[str, Detail] = {}


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured in the same run: bytes read and written per second by a copy, bfloat16 operations
    per second of a matrix product of random numbers."""

    bytes_per_s: float
    flops: float


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """``capability`` is that of a CUDA device, as "9.0"; ``packages`` are versions by name."""

    device: str
    capability: str = ""
    multiprocessors: int = 0
    memory_bytes: int = 0
    l2_bytes: int = 0
    driver: str = ""
    python: str = ""
    packages: dict[str, str] = {}


class Report(msgspec.Struct, kw_only=True):
    """All of one run. ``section_s`` are the seconds that each section took; a section that is not
    there was not run."""

    command: list[str]
    smoke: bool
    seed: int
    begun_utc: str
    environment: Environment | None = None
    ceilings: Ceilings | None = None
    section_s: dict[str, float] = {}
    rows: list[Row] = []

    def save(self, path: Path) -> None:
        """Write it at once or not at all, so that a run that is cut leaves a whole file."""
        content = msgspec.to_builtins(self)
        content["goals"] = [
            {
                "section": row.section,
                "name": row.name,
                "goal": goal.text,
                "met": goal.met(row.value, row.share),
            }
            for row in self.rows
            for goal in goals_of(row.section, row.name)
            if not self.smoke
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        partial.replace(path)


def table(report: Report) -> list[str]:
    """For people: a line a row, with the goals that the row has."""
    header = ("", "measured", "", "ceiling", "share", "goal")
    lines = [header, *(_cells(row, judged=not report.smoke) for row in report.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text: list[str] = []
    section = ""
    for row, cells in zip([None, *report.rows], lines, strict=True):
        if row is not None and row.section != section:
            section = row.section
            text.append(f"{section} ({report.section_s.get(section, 0.0):.0f} s)")
        name, value, unit, ceiling, share, goal = cells
        text.append(
            f"  {name:{widths[0]}}  {value:>{widths[1]}} {unit:{widths[2]}}  "
            f"{ceiling:>{widths[3]}}  {share:>{widths[4]}}  {goal}".rstrip()
        )
    return text


def summary(report: Report) -> str:
    """How many goals were met, and which rows failed."""
    verdicts = [
        goal.met(row.value, row.share)
        for row in report.rows
        for goal in goals_of(row.section, row.name)
    ]
    failed = [f"{row.section}: {row.name}" for row in report.rows if row.failure]
    judged = "not judged in a smoke run" if report.smoke else f"{sum(map(bool, verdicts))} met"
    failures = f"; failed: {', '.join(failed)}" if failed else ""
    return f"{len(verdicts)} goals, {judged}{failures}"


def _cells(row: Row, *, judged: bool) -> tuple[str, str, str, str, str, str]:
    if row.failure:
        return row.name, "failed", "", "", "", row.failure.splitlines()[0][:120]
    return (
        row.name,
        _number(row.value),
        row.unit,
        _number(row.ceiling),
        "" if row.share is None else f"{row.share:.1%}",
        "; ".join(_goals(row, judged=judged)) or str(row.details.get("note", "")),
    )


def _goals(row: Row, *, judged: bool) -> Iterable[str]:
    for goal in goals_of(row.section, row.name):
        verdict = goal.met(row.value, row.share)
        yield f"{goal.text}: {'met' if verdict else 'missed'}" if judged else goal.text


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or 0.01 <= abs(value) < 1e7:
        digits = max(0, 3 - len(str(int(abs(value)))))
        return f"{value:,.{digits}f}"
    return f"{value:.2e}"
