"""Report of measurements, with their ceilings and goals."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec


class Goal(NamedTuple):
    """Goal for a row's value or its share of the ceiling; one of the bounds is given."""

    text: str
    least_value: float | None = None
    most_value: float | None = None
    least_share: float | None = None

    def met(self, value: float | None, share: float | None) -> bool:
        if self.least_share is not None:
            return share is not None and share >= self.least_share
        if value is None:
            return False
        if self.least_value is not None:
            return value >= self.least_value
        return self.most_value is not None and value <= self.most_value


def share(least: float) -> Goal:
    return Goal(f">= {least:.0%} of the ceiling", least_share=least)


LLAMA_8B, QWEN_06B, QWEN_8B = "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b"
KERNELS, TOKENS, ADAPTERS = "kernels", "tokens", "adapters"
SPECULATION = "speculation"
TRANSFORMERS = "transformers-"

START = "start, weights to recorded graphs"
NANO = "256 requests, 100-1024 in and out"
THOUSAND = "1000 in, 1000 out"
BUSY = "GPU busy during decode"
DECODE_ATTENTION = "decode attention, 64 x 4k"
SKEWED_ATTENTION = "decode attention, skewed over balanced"
LOGITS_ERROR = "logits in bf16, relative error to fp32"
STEPS_BESIDE_LOADS = "steps while adapters are loaded, p99 over p99 without"
EQUAL_ANSWERS = "answers that are the same with proposals"
DETERMINISTIC = "deterministic: requests whose tokens never change"


def decode(batch: int) -> str:
    return f"decode step, batch {batch}, 1k context"


def prefill(count: int, num_tokens: int) -> str:
    return f"prefill, {count} x {num_tokens}"


def adapted(streams: int, changed: str) -> str:
    return f"tokens/s, {streams} streams, adapters of {changed} over the base"


def predicted(streams: int) -> str:
    return f"tokens/s with predictions that are 80 % right over without, {streams} streams"


def over(load: str) -> str:
    return f"millrace over transformers: {load}"


_FOUR_TIMES = Goal(">= 4 x", least_value=4.0)
_ALMOST = Goal(">= 0.95 x", least_value=0.95)

_GOALS: dict[tuple[str, str], tuple[Goal, ...]] = {
    (LLAMA_8B, START): (Goal("<= 60 s", most_value=60.0),),
    (LLAMA_8B, decode(1)): (share(0.85), Goal("<= 4.1 ms", most_value=4.1)),
    (LLAMA_8B, decode(256)): (share(0.75),),
    (LLAMA_8B, prefill(8, 1024)): (share(0.60),),
    (KERNELS, DECODE_ATTENTION): (share(0.85),),
    (KERNELS, SKEWED_ATTENTION): (Goal("<= 1.3 x", most_value=1.3),),
    (QWEN_06B, NANO): (Goal(">= 24,000 tokens/s", least_value=24_000.0),),
    (QWEN_8B, NANO): (Goal(">= 10,000 tokens/s", least_value=10_000.0),),
    (TRANSFORMERS + QWEN_06B, over(NANO)): (_FOUR_TIMES,),
    (TRANSFORMERS + QWEN_8B, over(NANO)): (_FOUR_TIMES,),
    (TRANSFORMERS + LLAMA_8B, over(THOUSAND)): (_FOUR_TIMES,),
    (ADAPTERS, adapted(1, "q v")): (_ALMOST,),
    (ADAPTERS, adapted(32, "q v")): (_ALMOST,),
    (ADAPTERS, STEPS_BESIDE_LOADS): (Goal("<= 1.2 x", most_value=1.2),),
    (SPECULATION, predicted(1)): (Goal(">= 2.2 x", least_value=2.2),),
    (SPECULATION, predicted(32)): (Goal(">= 0.98 x", least_value=0.98),),
    (SPECULATION, f"{EQUAL_ANSWERS}, 1 streams"): (Goal("all", least_share=1.0),),
    (SPECULATION, f"{EQUAL_ANSWERS}, 32 streams"): (Goal("all", least_share=1.0),),
    (TOKENS, LOGITS_ERROR): (Goal("<= 0.02", most_value=0.02),),
    (TOKENS, DETERMINISTIC): (Goal("all", least_share=1.0),),
} | {(model, BUSY): (share(0.97),) for model in (LLAMA_8B, QWEN_06B, QWEN_8B)}


def goals_of(section: str, name: str) -> tuple[Goal, ...]:
    """Return the goals of a row, which may be none."""
    return _GOALS.get((section, name), ())


Detail = float | int | str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the report: one figure.

    ``ceiling`` is in the same ``unit``. ``share`` is the reached part of it; for times it is the
    ceiling over the value. A ``failure`` says why there is no figure, or why it is invalid.
    """

    section: str
    name: str
    value: float | None = None
    unit: str = ""
    ceiling: float | None = None
    share: float | None = None
    failure: str = ""
    details: dict[str, Detail] = {}


class RunSettings(NamedTuple):
    """Settings of a section.

    ``smoke`` uses tiny sizes on the CPU, whose figures mean nothing. ``sweeps`` times tiles of
    kernels. ``kernels`` are parts of their names, by default all.
    """

    smoke: bool
    seed: int
    kernels: tuple[str, ...] = ()
    sweeps: bool = False


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings of the same run.

    They are the bytes read and written per second by a copy, and the bfloat16 operations per second
    of a matrix product of random numbers.
    """

    bytes_per_s: float
    flops: float


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Environment; ``capability`` of a CUDA device as "9.0", ``packages`` are versions by name."""

    device: str
    capability: str = ""
    multiprocessors: int = 0
    memory_bytes: int = 0
    l2_bytes: int = 0
    driver: str = ""
    python: str = ""
    packages: dict[str, str] = {}


class Report(msgspec.Struct, kw_only=True):
    """Report of one run.

    ``section_s`` has the seconds of each section; a missing section was not run.
    """

    command: list[str]
    smoke: bool
    seed: int
    begun_utc: str
    environment: Environment | None = None
    ceilings: Ceilings | None = None
    section_s: dict[str, float] = {}
    rows: list[Row] = []

    def save(self, path: Path) -> None:
        """Write the report atomically, so that an interrupted run leaves a whole file."""
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
    """Format a line for each row, with its goals."""
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
    """Return the number of goals met, and the failed rows."""
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
