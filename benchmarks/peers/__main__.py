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
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.model import write_100m
from benchmarks.support.processes import in_new_process


class _Runs:
    """Systems and loads of one run, and its report."""

    def __init__(self, checkpoint: Path, folder: Path, runs: int, load: str) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._runs = runs
        self._vocab_size = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
        self.loads = [one for one in LOADS if load in one.name]
        self.report = Report(ceilings=in_new_process(measured, checkpoint))
        own = millrace(checkpoint, folder)
        self.starts: dict[str, Callable[[], None]] = {
            MILLRACE_ENGINE: partial(self._alone, MILLRACE_ENGINE),
            MILLRACE: partial(self.served, MILLRACE, own),
            TRANSFORMERS: partial(self._alone, TRANSFORMERS),
        }

    def run(self, system: str) -> None:
        """Measure a system; its failure is reported and does not end the run."""
        print(f"measuring {system}", file=sys.stderr, flush=True)
        try:
            self.starts[system]()
        except (MissingTokensError, OSError, RuntimeError) as error:
            self.report.failures[system] = str(error)

    def served(self, system: str, server: AbstractContextManager[str]) -> None:
        with server as url:
            for load in self.loads:
                figures = measure_server(url, load, self._runs, self._vocab_size)
                self.report.add(load.name, system, figures)

    def _alone(self, system: str) -> None:
        found = in_new_process(measure_alone, system, self._checkpoint, self.loads, self._runs)
        for load, figures in found.items():
            self.report.add(load, system, figures)


def run(
    runs: int = 3,
    load: str = "",
    only: Sequence[str] = (),
    checkpoint: Path | None = None,
    vllm_python: Path | None = None,
    vllm_cores: str = "auto",
    url: Sequence[str] = (),
) -> PartResult:
    """Run the comparison and report the medians of ``runs``.

    ``load`` is a part of the names of the loads to run. ``checkpoint`` replaces a new one.
    ``vllm_python`` has vLLM for CPUs, and ``vllm_cores`` is its VLLM_CPU_OMP_THREADS_BIND. Each
    ``url`` is NAME=URL.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = checkpoint or in_new_process(write_100m, folder / "llama-100m")
        systems = _Runs(made, folder, runs, load)
        if vllm_python:
            for system, eager in (("vllm", False), ("vllm-eager", True)):
                server = vllm(vllm_python, made, folder, eager=eager, cores=vllm_cores)
                systems.starts[system] = partial(systems.served, system, server)
        for one in url:
            system, _, address = one.partition("=")
            if not system or not address.startswith("http"):
                sys.exit(f"--url: {one!r} is not NAME=http://HOST:PORT")
            known = nullcontext(address.rstrip("/").removesuffix("/v1"))
            systems.starts[system] = partial(systems.served, system, known)
        if unknown := set(only) - systems.starts.keys():
            sys.exit(f"--only: no such system here: {', '.join(sorted(unknown))}")
        for system in only or systems.starts:
            systems.run(system)
    report = systems.report
    print("\n".join(lines(report.ceilings)))
    for one_load in systems.loads:
        print("\n" + "\n".join(table(one_load, report)))
    for system, reason in report.failures.items():
        print(f"\n{system} failed: {reason}", file=sys.stderr)
    return PartResult(report.content(), not report.failures)


if __name__ == "__main__":
    sys.exit(run_command("peers", run, __doc__))
