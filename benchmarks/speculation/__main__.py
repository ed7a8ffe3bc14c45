"""Tokens per second with and without proposed tokens, on a 100M Llama in bfloat16, and a check that
no token differs.

    OMP_NUM_THREADS=2 python -m benchmarks.speculation [--runs N] [--requests N] [--only NAME]
        [--save]

Engines with and without proposals take turns step by step, so both see the same machine. A ratio is
the median of several runs; beside it is the ratio of CPU time, which other processes do not affect.
A model with random weights and a head with known successors writes the texts, so the text of a
prompt or prediction recurs, except where it was changed.

Then ``--requests`` of all kinds (greedy, drawn, penalties, grammars, several completions,
log-probabilities) are answered with and without proposals. Every second one of the former continues
at some token on another engine, as after a kill.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.checkpoints import LLAMA_100M, write_llama
from benchmarks.speculation.copier import write_copier, write_copier_head
from benchmarks.speculation.equality import Equality, compare
from benchmarks.speculation.loads import LOADS, Load, Model, Proposer
from benchmarks.support.command import PartResult, run_command
from millrace.engine.step.engine import Engine
from millrace.registry.demo import MODEL_DIR
from millrace.schemas.config import EngineConfig

_NUM_WARM_UP = 2
# Shape of a twentieth of the target, with the same vocabulary.
_DRAFT_SHAPE = LLAMA_100M._replace(
    hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=512
)
_AGREEMENT = 0.8


class Rate(NamedTuple):
    """Tokens of answers after the first, in seconds and in seconds of CPU time."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        return self.num_tokens / self.cpu_s


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one load: tokens/s, ratios with to without proposals, and their acceptance."""

    name: str
    goal: float
    tokens_per_s_without: float
    tokens_per_s_with: float
    ratio: float
    cpu_ratio: float
    proposed: int
    accepted: int


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results."""

    num_threads: int
    loads: list[Measured]
    equality: Equality


def run(runs: int = 6, requests: int = 2_000, only: str = "") -> PartResult:
    """Print a line per load with ``only`` in its name, and how many of ``requests`` differ."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            Model.COPIER: write_copier(Path(folder) / "copier"),
            Model.PLAIN: write_llama(Path(folder) / "plain"),
            Model.DEMO: MODEL_DIR,
        }
        draft = write_copier(Path(folder) / "draft", _DRAFT_SHAPE, agreement=_AGREEMENT)
        head = write_copier_head(Path(folder) / "head", paths[Model.COPIER], agreement=_AGREEMENT)
        speculations = {
            Proposer.NGRAM: "ngram",
            Proposer.DRAFT: f"draft={draft}",
            Proposer.EAGLE3: f"eagle3={head}",
            Proposer.OWN: None,
        }
        print(f"{torch.get_num_threads()} threads; tokens/s without and with, ratio, CPU's ratio")
        loads = [
            _measure(load, paths[load.model], speculations[load.proposer], load.times * runs)
            for load in LOADS
            if only in load.name
        ]
        equality = compare(paths[Model.COPIER], requests)
    print(
        f"{equality.num_requests} requests, {equality.num_moved} of them moved: "
        f"{equality.num_different} differ; {equality.accepted} of {equality.proposed} proposed "
        "tokens came"
    )
    return PartResult(Results(num_threads=torch.get_num_threads(), loads=loads, equality=equality))


def _measure(load: Load, path: Path, speculation: str | None, num_runs: int) -> Measured:
    engines = [_engine(path, "off"), _engine(path, speculation)]
    rates: list[list[Rate]] = [[], []]
    for run in range(_NUM_WARM_UP + num_runs):
        both = _run(engines, load, run)
        if run >= _NUM_WARM_UP:
            for own, rate in zip(rates, both, strict=True):
                own.append(rate)
    pairs = list(zip(*rates, strict=True))
    without, with_ = (statistics.median(rate.per_s for rate in own) for own in rates)
    stats = engines[1].stats()
    measured = Measured(
        name=load.name,
        goal=load.goal,
        tokens_per_s_without=without,
        tokens_per_s_with=with_,
        ratio=statistics.median(new.per_s / old.per_s for old, new in pairs),
        cpu_ratio=statistics.median(new.per_cpu_s / old.per_cpu_s for old, new in pairs),
        proposed=stats.proposed_tokens,
        accepted=stats.accepted_tokens,
    )
    print(
        f"{load.name:45} {without:7.1f} {with_:7.1f} {measured.ratio:6.2f}x "
        f"{measured.cpu_ratio:6.2f}x (goal {load.goal:.2f}x), {stats.accepted_tokens} of "
        f"{stats.proposed_tokens} proposed tokens came",
        flush=True,
    )
    return measured


def _engine(path: Path, speculation: str | None) -> Engine:
    config = msgspec.convert({"device": "cpu", "speculation": speculation}, EngineConfig)
    # Both use the same kernels, without a choice by measurement.
    return Engine.load(path, msgspec.structs.replace(config, dtype="bfloat16", kernels="native"))


def _run(engines: list[Engine], load: Load, run: int) -> list[Rate]:
    """Answer a run's requests on each engine, step by step in turns.

    Times the tokens after their first ones.
    """
    requests = load.requests(run)
    for engine in engines:
        for request in requests:
            engine.add(request)
    waiting = [{request.request_id for request in requests} for _ in engines]
    rates = [Rate(0, 0.0, 0.0)] * len(engines)
    while any(engine.has_work for engine in engines):
        for index, engine in enumerate(engines):
            if not engine.has_work:
                continue
            begin = time.perf_counter(), time.process_time()
            outputs = engine.step()
            end = time.perf_counter(), time.process_time()
            if waiting[index]:
                waiting[index].difference_update(o.request_id for o in outputs if o.token_ids)
                continue
            num_tokens = sum(len(output.token_ids) for output in outputs)
            before = rates[index]
            rates[index] = Rate(
                before.num_tokens + num_tokens,
                before.wall_s + end[0] - begin[0],
                before.cpu_s + end[1] - begin[1],
            )
    return rates


if __name__ == "__main__":
    sys.exit(run_command("speculation", run, __doc__))
