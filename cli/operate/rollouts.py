"""``millrace models promote``, ``rollback``, ``retire`` and ``rollouts``: move traffic from one
version of a model to another, and back."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING

from millrace.cli.arguments import path_or_name, seconds, whole_number
from millrace.cli.operate.status import change, from_anywhere
from millrace.cli.store_access import (
    add_store_arguments,
    answer,
    print_columns,
    print_json,
    served_catalogue,
    with_store,
)
from millrace.schemas.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    from millrace.bus.fleet.rollouts import RolloutStore
    from millrace.runtime.redis.link import RedisLink
    from millrace.schemas.models.rollouts import Rollout, RolloutReport

ABORTED = 1
_LOOK_EVERY_S = 0.5


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the rollout commands."""
    promote = commands.add_parser(
        "promote",
        help="move a model's traffic to another version",
        description="Give NAME@VERSION a share of the requests for NAME, once one of its workers "
        "is up, and increase the share step by step to 100 %. If --abort-if becomes true, the old "
        "version gets all requests again. Streams stay with their first version. The command "
        "shows the progress until the end; the rollout continues if the command is interrupted. "
        "The exit code is 1 if the rollout is aborted.",
    )
    promote.add_argument("version", metavar="NAME@VERSION")
    promote.add_argument(
        "--model",
        type=path_or_name,
        metavar="NAME|PATH",
        help="start serving the version first, as millrace models add does (default: it is served "
        "already)",
    )
    promote.add_argument(
        "--workers", type=whole_number, default=1, help="workers, with --model (default: 1)"
    )
    promote.add_argument(
        "--canary", type=float, default=100.0, metavar="PERCENT", help="first share (default: all)"
    )
    promote.add_argument(
        "--step",
        type=float,
        default=20.0,
        metavar="PERCENT",
        help="percentage added at each step (default: 20)",
    )
    promote.add_argument(
        "--interval",
        default="5m",
        metavar="TIME",
        help="duration of each step, as in 90s, 5m or 1h (default: %(default)s)",
    )
    promote.add_argument(
        "--min-requests",
        type=whole_number,
        default=10,
        metavar="N",
        help="requests of the version that must end before the next step (default: 10)",
    )
    promote.add_argument(
        "--abort-if",
        default="",
        metavar="RULE",
        help="conditions joined by or, such as 'error_rate>0.01 or ttft_p95>1.5x': error_rate, or "
        "ttft, tpot or total with _p50, _p90, _p95 or _p99, above a share, a time (800ms), or a "
        "multiple (1.5x) of the old version's value",
    )
    promote.add_argument("--no-wait", action="store_true", help="do not wait for the end")
    add_store_arguments(promote, _promote)

    rollback = commands.add_parser(
        "rollback",
        help="return a model's traffic to its previous version",
        description="Abort the rollout of NAME, or undo the last one.",
    )
    rollback.add_argument("name", metavar="NAME")
    add_store_arguments(rollback, _rollback)

    retire = commands.add_parser(
        "retire",
        help="stop serving a version once no requests wait for it",
        description="Stop the workers of a version without a share of its model's requests, after "
        "its waiting and running requests have ended.",
    )
    retire.add_argument("version", metavar="NAME@VERSION", help="or NAME for the first version")
    add_store_arguments(retire, _retire)

    listing = commands.add_parser("rollouts", help="show the latest rollout of each model")
    add_store_arguments(listing, _list)


def _promote(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.rollouts import RolloutStore
    from millrace.registry.rollouts.abort_rule import AbortRule
    from millrace.registry.rollouts.decisions import begin
    from millrace.schemas.models.rollouts import RolloutState, StartRolloutRequest

    asked = StartRolloutRequest(
        version=arguments.version,
        canary_percent=arguments.canary,
        step_percent=arguments.step,
        interval_s=seconds("--interval", arguments.interval),
        min_requests=arguments.min_requests,
        abort_if=arguments.abort_if,
    )
    AbortRule.parse(asked.abort_if)  # before workers are started for it
    if arguments.model is not None and asked.version not in served_catalogue(arguments).names():
        _serve(arguments)

    async def promote(link: RedisLink) -> RolloutReport:
        store = RolloutStore(link)
        known = {one.model: one for one in await store.all()}
        names = served_catalogue(arguments).names()
        begun = begin(asked, names, known, time.time_ns())
        rollout = await store.start(begun, known.get(begun.model))
        return await _follow(store, rollout, arguments)

    report = with_store(arguments, promote)
    if arguments.json:
        print_json(report)
    return ABORTED if report.rollout.state is RolloutState.ABORTED else 0


def _serve(arguments: argparse.Namespace) -> None:
    from millrace.cli.local.control import AddModelRequest

    if arguments.redis is not None or arguments.config is not None:
        raise ConfigError("--model starts workers on this machine: it goes with --data alone.")
    model = from_anywhere(arguments.model)
    request = AddModelRequest(name=arguments.version, model=model, workers=arguments.workers)
    change(arguments.data, request)


async def _follow(
    store: RolloutStore, rollout: Rollout, arguments: argparse.Namespace
) -> RolloutReport:
    """Print the progress of a rollout to its end."""
    from millrace.schemas.models.rollouts import RolloutReport

    report, told = RolloutReport(rollout=rollout), ""
    while True:
        text = _told(report.rollout)
        if text != told and not arguments.json:
            print(text, flush=True)
        told = text
        if not report.rollout.is_open or arguments.no_wait:
            return report
        await asyncio.sleep(_LOOK_EVERY_S)
        latest = await store.report(rollout.model)
        if latest is not None:
            report = latest


def _told(rollout: Rollout) -> str:
    """Describe the state of a rollout in a line."""
    from millrace.schemas.models.rollouts import RolloutState

    model, candidate = rollout.model, rollout.candidate
    match rollout.state:
        case RolloutState.WAITING:
            return f"waiting for a worker of {candidate} …"
        case RolloutState.RUNNING:
            return f"{candidate} answers {rollout.percent:g} % of the requests for {model}"
        case RolloutState.COMPLETED:
            return f"{rollout.stable} answers for {model}; {rollout.former} may be retired"
        case RolloutState.ABORTED:
            return f"aborted ({rollout.reason}): {rollout.stable} answers for {model}"


def _rollback(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.rollouts import RolloutStore
    from millrace.registry.rollouts.decisions import returned

    names, now_ns = served_catalogue(arguments).names(), time.time_ns()
    rollout = with_store(
        arguments,
        lambda link: RolloutStore(link).apply(
            arguments.name, lambda known: returned(known, names, now_ns)
        ),
    )
    return answer(arguments, rollout, _told(rollout))


def _retire(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.rollouts import RolloutStore
    from millrace.cli.local.control import RemoveModelRequest
    from millrace.registry.rollouts.versions import INITIAL, Versions, split

    versions = Versions(served_catalogue(arguments).names())
    model, label = split(arguments.version)
    name = model if label == INITIAL else arguments.version
    if name not in versions.of(model):
        known = ", ".join(versions.of(model)) or "none"
        raise ModelNotFoundError(f"There is no version {name!r:.200}. Versions: {known}.")

    rollout = with_store(arguments, lambda link: RolloutStore(link).find(model))
    stable = versions.stable(model, {} if rollout is None else {model: rollout})
    if name == stable or (rollout is not None and rollout.is_open and name == rollout.candidate):
        raise ConfigError(
            f"{name} answers requests for {model}; promote another version first, or roll back."
        )
    if arguments.redis or arguments.config:
        raise ConfigError("The workers to stop are those of this machine: retire takes --data.")
    return change(arguments.data, RemoveModelRequest(name, when_idle=True))


def _list(arguments: argparse.Namespace) -> int:
    from millrace.bus.fleet.rollouts import RolloutStore

    reports = with_store(arguments, lambda link: RolloutStore(link).reports())
    if arguments.json or not reports:
        none = "no rollouts; begin one with millrace models promote NAME@VERSION"
        return answer(arguments, reports, none)
    print_columns(
        ("model", "state", "version", "share", "requests", "errors", "ttft p95", "why"),
        (row for report in reports for row in _rows(report)),
    )
    return 0


def _rows(report: RolloutReport) -> list[tuple[str, ...]]:
    """Return a row for each version, the candidate first."""
    rollout, seen = report.rollout, {one.version: one for one in report.figures}
    shares = {rollout.candidate: rollout.percent, rollout.stable: 100.0 - rollout.percent}
    rows: list[tuple[str, ...]] = []
    for version, percent in shares.items():
        first, figures = not rows, seen.get(version)
        p95 = None if figures is None else figures.percentiles_ms.get("ttft_p95")
        rows.append(
            (
                rollout.model if first else "",
                rollout.state.value if first else "",
                version,
                f"{percent:g} %",
                "" if figures is None else str(figures.num_requests),
                "" if figures is None else f"{figures.error_rate:.1%}",
                "" if p95 is None else f"{p95:.0f} ms",
                rollout.reason if first else "",
            )
        )
    return rows
