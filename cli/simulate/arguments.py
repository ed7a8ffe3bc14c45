"""Command line of ``millrace simulate``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from millrace.cli.arguments import (
    SPREAD,
    add_report_arguments,
    as_path,
    check_folders,
    path_or_name,
    whole_number,
)
from millrace.cli.endpoints import add_data_argument
from millrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from millrace.simulation.traces.synthesise import TraceRecipe
    from millrace.simulation.traces.trace import TraceRequest

_DESCRIPTION = """\
Run a trace of requests through the scheduler as it is, with simulated workers, in virtual time, and
say what came of it: latencies, goodput under an SLO, fairness among tenants, prefix hits, workers'
utilisation, GPU-hours and what a million tokens cost. Several policies are compared on the same
trace. The same arguments give the same report.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace simulate``."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate policies and fleets on a trace, in virtual time",
        description=_DESCRIPTION,
    )
    parser.set_defaults(handler=run)
    add_data_argument(parser)
    _add_trace(parser.add_argument_group("the trace"))
    _add_policy(parser.add_argument_group("the scheduler"))
    _add_workers(parser.add_argument_group("the workers"))
    _add_group(parser.add_argument_group("a worker of several devices"))
    _add_results(parser.add_argument_group("the results"))
    commands = parser.add_subparsers(metavar="[synthesise]", dest="simulate_command")
    _add_synthesise(commands)


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", type=as_path, metavar="FILE.jsonl", help="see docs/simulate.md")
    group.add_argument(
        "--from-clickhouse",
        action="store_true",
        help="the requests of a time range from the analytics store instead",
    )
    group.add_argument("--since", metavar="TIME", help="such as 2026-01-31T18:30:00, in UTC")
    group.add_argument("--until", metavar="TIME")
    group.add_argument(
        "--save-trace", type=as_path, metavar="FILE.jsonl", help="also write the trace to this file"
    )
    group.add_argument("--seed", type=int, default=0, help="of failures and texts (default: 0)")
    group.add_argument(
        "--drain",
        default="1h",
        metavar="TIME",
        help="longest wait for answers after the last arrival (default: %(default)s)",
    )


def _add_policy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        default="fair",
        metavar="P,…",
        help="an order (fair, fifo, shortest), a placement (affine, least_loaded), or both joined "
        "by a plus sign; several are compared (default: %(default)s, which is fair+affine)",
    )
    group.add_argument(
        "--config", type=path_or_name, metavar="FILE", help="settings of scheduler and worker"
    )
    group.add_argument("--max-queued-jobs", type=whole_number, metavar="N", help="more are shed")
    group.add_argument(
        "--autoscale",
        metavar="MIN:MAX",
        help="let the scheduler's autoscaler set the number of workers",
    )


def _add_workers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        default="1",
        metavar="N|ROLE:N,ROLE:N",
        help="workers of each model, or demo=8,large=2 (default: 1); prefill:2,decode:2 computes "
        "long prompts apart from streams (docs/kv-cache.md)",
    )
    group.add_argument(
        "--switch-roles",
        action="store_true",
        help="let the scheduler change the roles of --workers by the load of each role",
    )
    group.add_argument(
        "--kv-bytes-per-token",
        type=float,
        metavar="N",
        help="of keys and values that are pulled (default: 131072, a Llama 8B's in 16 bits)",
    )
    group.add_argument(
        "--link-gbytes-per-s",
        type=float,
        metavar="R",
        help="bandwidth of a worker's link in each direction (default: 50, 400 Gbit/s)",
    )
    group.add_argument(
        "--pull-overhead", metavar="TIME", help="of each pull beside its bytes (default: 5ms)"
    )
    group.add_argument("--prefill-tokens-per-s", type=float, metavar="R")
    group.add_argument("--step-ms", type=float, metavar="MS", help="of a step that decodes")
    group.add_argument("--step-ms-per-sequence", type=float, metavar="MS")
    group.add_argument("--step-ms-per-kv-token", type=float, metavar="MS")
    group.add_argument("--max-num-sequences", type=whole_number, metavar="N", help="default: 256")
    group.add_argument("--max-batch-tokens", type=whole_number, metavar="N", help="default: 4096")
    group.add_argument(
        "--num-blocks", type=whole_number, metavar="N", help="of 16 tokens; default: 16384"
    )
    group.add_argument(
        "--start-time", metavar="TIME", help="from a worker's start to its first job"
    )
    group.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="worker=N@TIME",
        help="time at which the N-th worker dies; may be given again",
    )
    group.add_argument("--mtbf", metavar="TIME", help="mean time between failures of a worker")
    group.add_argument(
        "--restart-time",
        default="5s",
        metavar="TIME",
        help="time until a dead worker is restarted (default: %(default)s)",
    )
    group.add_argument(
        "--heartbeat", default="1s", metavar="TIME", help="of workers (default: %(default)s)"
    )


def _add_group(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel",
        type=whole_number,
        metavar="N",
        help="devices that compute each layer together; the times of steps and prompts, which are "
        "for one device, are divided by it, and the time of collectives is added "
        "(docs/parallelism.md)",
    )
    group.add_argument(
        "--model-shape",
        metavar="LAYERS,HIDDEN,VOCABULARY",
        help="shape of the model, which determines the size of collectives (default: "
        "32,4096,128256, a Llama 8B)",
    )
    group.add_argument(
        "--group-gbytes-per-s",
        type=float,
        metavar="R",
        help="bandwidth from a device to the others of its group (default: 450, NVLink 4 each way)",
    )
    group.add_argument(
        "--collective-us",
        type=float,
        metavar="US",
        help="latency of a collective besides its bytes (default: NCCL's model of a ring)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add_report_arguments(group)
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS")
    group.add_argument("--slo-tpot-ms", type=float, metavar="MS")
    group.add_argument(
        "--gpu-hour-price",
        default="2.5",
        metavar="MONEY",
        help="in USD, or with a currency, such as '2.5 EUR' (default: %(default)s)",
    )
    group.add_argument(
        "--gpus-per-worker", type=float, metavar="N", help="default: as --tensor-parallel, or 1"
    )


def _add_synthesise(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    parser = commands.add_parser(
        "synthesise", help="draw a trace and print it", description="Draw a trace and print it."
    )
    parser.set_defaults(handler=run_synthesise)
    parser.add_argument(
        "--kind", choices=("poisson", "bursty", "diurnal", "multiturn"), default="poisson"
    )
    parser.add_argument(
        "--rate", type=float, required=True, metavar="R", help="requests per second"
    )
    parser.add_argument("--duration", default="10m", metavar="TIME", help="default: %(default)s")
    parser.add_argument(
        "--tenants",
        default="1",
        metavar="N|NAME:TIER:WEIGHT,…",
        help="how many alike, or which and how much of the load each has (default: 1)",
    )
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--input-tokens", default="lognormal:400:0.8:8000", metavar="SPREAD")
    parser.add_argument(
        "--output-tokens",
        default="lognormal:200:0.6:2000",
        metavar="SPREAD",
        help=f"likewise {SPREAD} (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=whole_number, default=0, metavar="N", help="what every request states"
    )
    parser.add_argument("--deadline", metavar="TIME", help="of every request")
    parser.add_argument("--burstiness", type=float, default=0.2, metavar="SHAPE", help="of bursty")
    parser.add_argument("--swing", type=float, default=0.8, metavar="SHARE", help="of diurnal")
    parser.add_argument("--period", default="24h", metavar="TIME", help="of diurnal")
    parser.add_argument("--turns", type=float, default=5.0, metavar="N", help="of multiturn")
    parser.add_argument("--think-time", default="20s", metavar="TIME", help="between turns")
    parser.add_argument(
        "--system-prompts", type=whole_number, default=0, metavar="N", help="shared ones"
    )
    parser.add_argument(
        "--system-tokens", type=whole_number, default=500, metavar="N", help="in each"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> int:
    """Simulate; return 0 if every request ended, 1 if some were unfinished.

    Raises MillraceError if the simulation cannot run at all.
    """
    from millrace.cli.simulate.command import compare
    from millrace.cli.simulate.options import settings_of
    from millrace.simulation.settings import parse_policies

    check_folders(arguments.json, arguments.html, arguments.save_trace)
    policies = parse_policies(arguments.policy)
    settings = settings_of(arguments)
    trace = _trace_of(arguments)
    return compare(trace, settings, policies, json_file=arguments.json, html_file=arguments.html)


def _trace_of(arguments: argparse.Namespace) -> list[TraceRequest]:
    from millrace.cli.simulate.history import read_history
    from millrace.simulation.traces.trace import read_trace, write_trace

    if (arguments.trace is None) != arguments.from_clickhouse:
        raise ConfigError("give either --trace or --from-clickhouse")
    if not arguments.from_clickhouse:
        if arguments.since or arguments.until:
            raise ConfigError("--since and --until go with --from-clickhouse")
        trace = read_trace(arguments.trace)
    elif arguments.since is None or arguments.until is None:
        raise ConfigError("--from-clickhouse needs --since and --until")
    else:
        trace = read_history(arguments.data, arguments.since, arguments.until)
    if arguments.save_trace is not None:
        try:
            with arguments.save_trace.open("w") as file:
                write_trace(trace, file)
        except OSError as error:
            raise ConfigError(f"{arguments.save_trace}: {error.strerror}") from error
    return trace


def run_synthesise(arguments: argparse.Namespace) -> int:
    """Print a trace; return 0. Raises ConfigError, naming the argument at fault."""
    from millrace.cli.simulate.options import recipe_of
    from millrace.simulation.traces.synthesise import synthesise
    from millrace.simulation.traces.trace import write_trace

    recipe: TraceRecipe = recipe_of(arguments)
    try:
        trace = synthesise(recipe)
    except ValueError as error:
        raise ConfigError(f"these arguments describe no valid trace: {error}") from error
    write_trace(trace, sys.stdout)
    return 0
