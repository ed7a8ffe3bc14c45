"""``python -m benchmarks.chaos``: streams of clients while parts of the system are killed.

``millrace up`` runs the demo model on real engines, with two workers and two gateways. Clients,
half by WebSocket and half by server-sent events, stream greedy answers. Each round has one fault
(``benchmarks.chaos.faults`` has the table):

  - ``kill -9`` of a worker, its engine, both workers, the scheduler alone or with a worker, a
    gateway (whose clients resume at the other), nats-server, or Redis;
  - SIGTERM of a worker, which drains;
  - a part that is frozen for five seconds; a second worker of the same name.

``millrace up`` restarts killed parts. Further rounds kill a worker under answers that are hard to
move (JSON Schema, forced tool calls, three choices, log-probabilities, penalties), either worker
under long prompts, or a draining worker while its streams' blocks are being pulled. With
``--workers prefill:1,decode:1`` the first worker computes long prompts and the second continues
them. In the last round, which needs root, the disk is full for a while: new requests must be
refused with that reason, and accepted within 10 s after space is free.

Each round checks that no answer is lost, no token index is missing or repeated, each request has
one record in ClickHouse, and each answer equals the undisturbed run's, token by token. Prints the
longest silence of each affected stream across the event, beside the longest of the undisturbed run,
and the loading time of restarted workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.chaos.faults import DISK_FULL, EVENTS, Event
from benchmarks.chaos.rounds import WRONGS, Round, Streams
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.figures import percentile
from tests.support.small_disk import NoDiskError, mounted_disk
from tests.support.system import System

_PORT = 18_400
_WORKERS = "2"
_SLOTS = 256
# A disk in memory, which a full disk occupies completely.
_DISK_MIB = 1_024
_GOALS_S = {
    "worker killed": (2.5, 5.0),
    "worker drained": (None, 0.3),
    "engine child killed": (None, 4.0),
    "scheduler and worker killed": (None, 6.0),
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of a run: ``events`` by name, and two ``workers`` in the format of ``millrace up``.

    ``limit_s`` bounds all rounds together, ``round_limit_s`` one round.
    """

    events: tuple[str, ...]
    workers: str
    rounds: int
    streams: int
    tokens: int
    limit_s: float
    round_limit_s: float


_NAMES = tuple(event.name for event in EVENTS)


def run(
    only: Sequence[str] = _NAMES,
    workers: str = _WORKERS,
    rounds: int = 10,
    streams: int = 200,
    tokens: int = 192,
    limit_s: float = 3_600.0,
    round_limit_s: float = 120.0,
    smoke: bool = False,
) -> PartResult:
    """Run ``rounds`` of each event in ``only``; ``smoke`` is one round with few streams."""
    if unknown := set(only) - set(_NAMES):
        sys.exit(f"no such event: {', '.join(sorted(unknown))}; there are {', '.join(_NAMES)}")
    if smoke:
        rounds, streams, tokens = 1, 10, 150
    plan = Plan(
        events=tuple(only),
        workers=workers,
        rounds=rounds,
        streams=streams,
        tokens=tokens,
        limit_s=limit_s,
        round_limit_s=round_limit_s,
    )
    with tempfile.TemporaryDirectory(prefix="millrace-chaos-") as folder:
        try:
            report = _report(plan, *_play(plan, Path(folder)))
        except NoDiskError as error:
            sys.exit(f"{DISK_FULL} takes root ({error}); leave it out with --only")
    if report["num_wrong"] and smoke:
        sys.exit(1)  # a smoke run has no goals but this
    file = "chaos.json" if workers == _WORKERS else "chaos_roles.json"
    return PartResult(report, not report["num_wrong"], f"scheduler/{file}")


def _play(plan: Plan, folder: Path) -> tuple[Streams, list[Round]]:
    """Run the plan. Raises NoDiskError if a disk is to be filled and none can be mounted."""
    with contextlib.ExitStack() as stack:
        if DISK_FULL in plan.events:
            stack.enter_context(mounted_disk(folder / "data", _DISK_MIB))
        system = _start(folder, plan.workers)
        stack.callback(system.stop)
        streams = Streams(system, plan.streams, plan.tokens, plan.round_limit_s)
        return streams, asyncio.run(_run(plan, streams))


def _start(folder: Path, workers: str) -> System:
    settings = folder / "settings.yaml"
    # Either worker has room for all streams. Questions are alike, so the cache would attract most
    # of them to one worker.
    tree = {
        "worker": {"engine": {"max_num_sequences": _SLOTS}},
        "scheduler": {"placement": "least_loaded"},
    }
    settings.write_text(json.dumps(tree))
    arguments = ("--port", str(_PORT), "--workers", workers, "--gateways", "2")
    return System(folder / "data", arguments=(*arguments, "--config", str(settings))).start()


async def _run(plan: Plan, streams: Streams) -> list[Round]:
    deadline_s = time.monotonic() + plan.limit_s
    await streams.run_undisturbed()
    print(
        f"{plan.streams} streams of {plan.tokens} tokens, undisturbed: longest silence "
        f"p50 {percentile(streams.usual_gaps_s, 0.5):.2f} s, "
        f"p99 {percentile(streams.usual_gaps_s, 0.99):.2f} s",
        flush=True,
    )
    rounds: list[Round] = []
    for number in range(plan.rounds):
        for event in (event for event in EVENTS if event.name in plan.events):
            if time.monotonic() > deadline_s:
                print(f"time limit reached in round {number + 1}")
                return rounds
            rounds.append(await streams.run(event))
            _say(number, event, rounds[-1])
    return rounds


def _say(number: int, event: Event, outcome: Round) -> None:
    print(
        f"{number + 1:2} {event.name:<27} {outcome.num_streaming:4} streaming, "
        f"{len(outcome.gaps_s):4} affected, gap p50 {percentile(outcome.gaps_s, 0.5):.2f} s p99 "
        f"{percentile(outcome.gaps_s, 0.99):.2f} s, round {outcome.wall_s:.1f} s"
        + "".join(f", a worker loaded after {loading_s:.1f} s" for loading_s in outcome.loading_s)
        + "".join(f"\n   WRONG: {wrong}" for wrong in outcome.wrongs[:5]),
        flush=True,
    )


def _report(plan: Plan, streams: Streams, rounds: Sequence[Round]) -> dict[str, Any]:
    """Print the sums and return them."""
    events = {
        event.name: _sums([one for one in rounds if one.event == event.name])
        for event in EVENTS
        if any(one.event == event.name for one in rounds)
    }
    for name, sums in events.items():
        goals = _GOALS_S.get(name)
        goal_text = "" if goals is None else f" (goals: p50 {goals[0] or '-'}, p99 {goals[1]})"
        print(
            f"{name}: {sums['num_rounds']} rounds, {sums['num_lost']} lost, "
            f"{sums['num_wrong_indices']} with wrong indices, "
            f"{sums['num_other_texts']} with another text, "
            f"{sums['num_without_record']} without and {sums['num_doubled_records']} with two "
            f"records; gap of {sums['num_affected']} p50 {sums['gap_p50_s']} s, "
            f"p99 {sums['gap_p99_s']} s{goal_text}"
            + (f", workers loaded after {sums['loading_p50_s']} s" if sums["num_loaded"] else "")
        )
    num_wrong = sum(sum(one.num_wrong.values()) for one in rounds)
    print(f"{num_wrong} checks failed" if num_wrong else "all checks passed")
    return {
        "plan": msgspec.to_builtins(plan),
        "undisturbed": _gap_figures(streams.usual_gaps_s),
        "events": events,
        "num_wrong": num_wrong,
    }


def _sums(rounds: Sequence[Round]) -> dict[str, Any]:
    gaps_s = [gap_s for one in rounds for gap_s in one.gaps_s]
    loading_s = [one_s for one in rounds for one_s in one.loading_s]
    return {
        "num_rounds": len(rounds),
        "num_streams": sum(one.num_streams for one in rounds),
        "num_streaming": sum(one.num_streaming for one in rounds),
        **{name: sum(one.num_wrong[name] for one in rounds) for name in WRONGS},
        "num_affected": len(gaps_s),
        **_gap_figures(gaps_s),
        "num_loaded": len(loading_s),
        "loading_p50_s": round(percentile(loading_s, 0.5), 3),
    }


def _gap_figures(gaps_s: Sequence[float]) -> dict[str, float]:
    return {
        "gap_p50_s": round(percentile(gaps_s, 0.5), 3),
        "gap_p99_s": round(percentile(gaps_s, 0.99), 3),
        "gap_max_s": round(max(gaps_s, default=0.0), 3),
    }


if __name__ == "__main__":
    raise SystemExit(run_command("chaos", run, __doc__))
