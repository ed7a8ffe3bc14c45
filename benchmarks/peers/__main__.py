"""Millrace beside other engines: the same model, load and client, in one run on one machine.

    python -m benchmarks.peers [--vllm-python PATH] [--url NAME=URL ...] [--save]

The model is a Llama of 100M parameters with random weights. Each system is measured alone, one
after the other, the median of several runs after a warm-up:

  millrace-engine  the engine alone, in a process with all cores
  millrace         ``millrace up``: gateway, bus, scheduler, worker, records; over HTTP
  transformers     its continuous batching, in a process with all cores
  vllm, vllm-eager vLLM's server, with and without compilation, if --vllm-python has it; over HTTP
  NAME             any OpenAI-compatible server that runs the same checkpoint, by --url NAME=URL

``python -m benchmarks.checkpoints FOLDER`` writes the checkpoint for a server of your own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks.engine.ceilings import lines, measured
from benchmarks.peers.loads import (
    LOADS,
    MILLRACE_ENGINE,
    TRANSFORMERS,
    MissingTokensError,
    measure_alone,
)
from benchmarks.peers.report import MILLRACE, Report, table
from benchmarks.peers.servers import measure_server, millrace, vllm
from benchmarks.support.command import command_parser
from benchmarks.support.model import write_100m
from benchmarks.support.processes import in_new_process

_RESULT = Path(__file__).parents[1] / "results" / "peers.json"
_VLLM = "vllm"
_VLLM_EAGER = "vllm-eager"


class _Runs:
    """Measures one system after the other into a report."""

    def __init__(self, arguments: argparse.Namespace, checkpoint: Path, folder: Path) -> None:
        self._arguments = arguments
        self._checkpoint = checkpoint
        self._folder = folder
        self._vocab_size = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
        self.loads = [load for load in LOADS if arguments.load in load.name]
        self.report = Report(ceilings=in_new_process(measured, checkpoint))

    def run(self, system: str) -> None:
        """Measure a system; what goes wrong with it is reported and ends it alone."""
        print(f"measuring {system}", file=sys.stderr, flush=True)
        try:
            self._starts()[system]()
        except (MissingTokensError, OSError, RuntimeError) as error:
            self.report.failures[system] = str(error)

    def systems(self) -> list[str]:
        """All that can be measured here."""
        return list(self._starts())

    def _starts(self) -> dict[str, Callable[[], None]]:
        starts: dict[str, Callable[[], None]] = {
            MILLRACE_ENGINE: partial(self._alone, MILLRACE_ENGINE),
            MILLRACE: partial(self._served, MILLRACE, millrace(self._checkpoint, self._folder)),
            TRANSFORMERS: partial(self._alone, TRANSFORMERS),
        }
        if self._arguments.vllm_python:
            starts[_VLLM] = partial(self._served, _VLLM, self._vllm(eager=False))
            starts[_VLLM_EAGER] = partial(self._served, _VLLM_EAGER, self._vllm(eager=True))
        for name, url in self._arguments.url:
            starts[name] = partial(self._served, name, nullcontext(url))
        return starts

    def _vllm(self, *, eager: bool) -> AbstractContextManager[str]:
        return vllm(
            self._arguments.vllm_python,
            self._checkpoint,
            self._folder,
            eager=eager,
            cores=self._arguments.vllm_cores,
        )

    def _served(self, system: str, server: AbstractContextManager[str]) -> None:
        with server as url:
            for load in self.loads:
                figures = measure_server(url, load, self._arguments.runs, self._vocab_size)
                self.report.add(load.name, system, figures)

    def _alone(self, system: str) -> None:
        found = in_new_process(
            measure_alone, system, self._checkpoint, self.loads, self._arguments.runs
        )
        for load, figures in found.items():
            self.report.add(load, system, figures)


def _name_and_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith("http"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return name, url.rstrip("/").removesuffix("/v1")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("peers", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="measured runs; the median counts")
    parser.add_argument("--load", default="", help="only loads with this in their name")
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="only these systems")
    parser.add_argument("--checkpoint", type=Path, help="instead of one that is made for the run")
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM for CPUs")
    parser.add_argument(
        "--vllm-cores", default="auto", help="its VLLM_CPU_OMP_THREADS_BIND (default: auto)"
    )
    parser.add_argument(
        "--url", type=_name_and_url, action="append", default=[], metavar="NAME=URL"
    )
    parser.add_argument("--save", action="store_true", help=f"write results/{_RESULT.name}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every system was measured, 1 if one failed."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = _Runs(
            parsed, parsed.checkpoint or in_new_process(write_100m, folder / "llama-100m"), folder
        )
        chosen = parsed.only or runs.systems()
        if unknown := set(chosen) - set(runs.systems()):
            parser.error(f"no such system here: {', '.join(sorted(unknown))}")
        for system in chosen:
            runs.run(system)
    report = runs.report
    print("\n".join(lines(report.ceilings)))
    for load in runs.loads:
        print("\n" + "\n".join(table(load, report)))
    for system, reason in report.failures.items():
        print(f"\n{system} failed: {reason}", file=sys.stderr)
    if parsed.save:
        _RESULT.write_bytes(report.to_json())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
