"""The engine on a GPU: kernels, steps and loads, beside the ceilings of the same run.

    python -m benchmarks.gpu [--only SECTION ...] [--save PATH]
    python -m benchmarks.gpu --smoke

Sections in their order (--only takes the beginning of a name; the ceilings are always measured):

  ceilings        bandwidth of a copy, rate of a bf16 matrix product
  kernels         each kernel: checked against a reference, its rate, its share of the ceiling
  llama-3.1-8b    the engine with random weights: decode steps, prefills, loads, busy share
  qwen3-0.6b      likewise
  qwen3-8b        likewise
  transformers-…  the loads on transformers' continuous batching, for each of these models
  tokens          logits and greedy tokens beside transformers in float32; --deterministic
  ablation        eager, recorded graphs, overlapped steps
  quantized       products with weights of 8 and 4 bits, beside those of bf16
  adapters        twenty LoRA adapters of rank 16 in one batch beside the base alone, at 1 to 256
                  streams, and steps while adapters load; by --only it has enough time
  speculation     mostly predicted answers, with and without proposals; deterministic
  tiles           only by --only: tiles of the kernels beside the tiles that their tables choose;
                  --kernels selects kernels by parts of their names

Each section has a share of --minutes. Figures are written when they are measured, so an interrupted
run keeps them. --smoke runs everything with tiny models on the CPU and kernels in Triton's
interpreter: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.report import Ceilings, Environment, Report, Row, RunSettings, summary, table
from benchmarks.gpu.sections import Item, Section, SectionProcesses, chosen
from benchmarks.support.command import command_parser

_RESULT = Path(__file__).parents[1] / "results" / "gpu.json"
_FILE = "gpu.json"
_TABLE = "gpu.txt"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if everything was measured and correct, else 1; goals may be missed."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    try:
        sections = chosen(parsed.only)
    except ValueError as error:
        parser.error(str(error))
    if parsed.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is loaded, which is later
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = parsed.out / _FILE if parsed.out else parsed.save
    report = Report(
        command=[shlex.join(sys.argv if arguments is None else ["benchmarks.gpu", *arguments])],
        smoke=parsed.smoke,
        seed=parsed.seed,
        begun_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        _run(sections, report, path, parsed)
    finally:
        lines = [*table(report), "", _machine(report), summary(report)]
        print("\n".join(lines), flush=True)
        if parsed.out:
            (parsed.out / _TABLE).write_text("\n".join(lines) + "\n")
    return 1 if any(row.failure for row in report.rows) else 0


def _run(
    sections: list[Section], report: Report, path: Path | None, parsed: argparse.Namespace
) -> None:
    settings = RunSettings(report.smoke, report.seed, tuple(parsed.kernels))
    processes = SectionProcesses(settings)
    deadline_s = time.monotonic() + parsed.minutes * 60

    def keep(item: Item) -> None:
        match item:
            case Row():
                report.rows.append(item)
            case Ceilings():
                report.ceilings = item
            case Environment():
                report.environment = item
        if path:
            report.save(path)

    for section in sections:
        left_s = deadline_s - time.monotonic()
        print(f"{section.name}: {left_s:.0f} s left", file=sys.stderr, flush=True)
        if left_s <= 0:
            keep(
                Row(
                    section=section.name,
                    name="all of it",
                    failure="the run's time limit was reached",
                )
            )
            continue
        begin_s = time.monotonic()
        processes.run(
            section, min(section.limit_s, left_s), report.ceilings, list(report.rows), keep
        )
        report.section_s[section.name] = round(time.monotonic() - begin_s, 1)
        if path:
            report.save(path)
        if report.environment is None:
            return  # no such device: the first section's row has the reason


def _machine(report: Report) -> str:
    if report.environment is None:
        return "the device could not be read"
    packages = ", ".join(f"{name} {version}" for name, version in _packages(report.environment))
    total_s = sum(report.section_s.values())
    return f"{report.environment.device}, {packages}; seed {report.seed}; {total_s:.0f} s"


def _packages(environment: Environment) -> list[tuple[str, str]]:
    return [("Python", environment.python), *environment.packages.items()]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION")
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="kernels of the section tiles, by parts of their names",
    )
    parser.add_argument("--smoke", action="store_true", help="run tiny sizes on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=8.7, help="limit of the run (default: 8.7)"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--save", type=Path, nargs="?", const=_RESULT, help=f"write results/{_RESULT.name} or PATH"
    )
    place.add_argument("--out", type=Path, help=f"write {_FILE} and {_TABLE} to this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
