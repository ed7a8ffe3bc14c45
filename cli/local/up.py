"""``millrace up``: all of Millrace on one machine, from packages alone."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from millrace.cli.endpoints import add_data_argument
from millrace.cli.local.private_files import make_private
from millrace.cli.local.worker_bounds import parse_bounds
from millrace.registry.catalogue import CatalogueEngine
from millrace.runtime.metrics_server import check_exposure
from millrace.runtime.settings import PREFIX, load_config
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from millrace.cli.endpoints import Endpoints
    from millrace.cli.local.stack import Plan
    from millrace.schemas.config import AutoscaleConfig, Config, EngineConfig, SchedulerConfig

_STOP_WITHIN_S = 9.0
# Each is a process of this machine.
_MOST_WORKERS = 256
_OWN_ADDRESSES = (
    "MILLRACE_NATS__URL",
    "MILLRACE_REDIS__URL",
    "MILLRACE_KAFKA__BOOTSTRAP_SERVERS",
    "MILLRACE_CLICKHOUSE__URL",
    "MILLRACE_CLICKHOUSE__PATH",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace up``."""
    parser = subparsers.add_parser("up", help="run everything on this machine", description=__doc__)
    parser.add_argument("--host", help="address of the gateway (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port of the gateway (default: 8000)")
    add_data_argument(parser)
    parser.add_argument(
        "--model",
        action="extend",
        nargs="+",
        metavar="NAME|PATH",
        help="a model of the catalogue, a folder in Hugging Face layout or a GGUF file "
        "(default: demo)",
    )
    parser.add_argument(
        "--workers", type=int, help="workers per model, with --autoscale at first (default: 1)"
    )
    parser.add_argument(
        "--autoscale",
        metavar="MIN:MAX",
        help="as many workers per model as the schedulers want; MIN 0: none for an idle model",
    )
    parser.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        help="what runs the models: Millrace's own engine (real), nothing that computes "
        "(simulated), or a server of another engine, which is started here (default: real)",
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="a server of that engine that runs already"
    )
    parser.add_argument(
        "--engine-command", metavar="PROGRAM", help="what starts such a server (default: its name)"
    )
    parser.add_argument(
        "--engine-arguments",
        metavar="TEXT",
        help='more of its command line, such as "--tensor-parallel-size 4"',
    )
    parser.add_argument("--gateways", type=int, default=1, help="gateways that share the port")
    parser.add_argument(
        "--schedulers", type=int, default=1, help="schedulers that share the work (default: 1)"
    )
    parser.add_argument("--catalogue", help="a models.yaml instead of the built-in one")
    parser.add_argument("--config", help="a YAML or TOML file of settings for all parts")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; 0 after an orderly stop, 1 if a part did not start."""
    for name in ("workers", "gateways", "schedulers"):
        count = getattr(arguments, name)
        if count is not None and count < 1:
            raise MillraceError(f"--{name} must be at least 1")
    data: Path = arguments.data.resolve()
    # What the servers write is for nobody else on this machine: they get this from us.
    usual = os.umask(0o077)
    try:
        return _run_private(arguments, data)
    finally:
        os.umask(usual)


def _run_private(arguments: argparse.Namespace, data: Path) -> int:
    try:
        make_private(data / "run")
    except OSError as error:
        raise ConfigError(f"--data {_shown(data)} cannot be used: {error.strerror}.") from error
    with (data / "run" / "up.pid").open("a+") as lock:
        _take_lock(lock, data)
        try:
            return asyncio.run(_run(_plan(arguments, data)))
        finally:
            lock.truncate(0)


def _plan(arguments: argparse.Namespace, data: Path) -> Plan:
    from millrace.cli.local.models import catalogue_for
    from millrace.cli.local.stack import Plan

    config = _settings(arguments)
    catalogue, models = catalogue_for(
        config.catalogue,
        arguments.model or ["demo"],
        data / "run" / "models.yaml",
        _engine(config.worker.engine),
    )
    return Plan(
        data=data,
        config=msgspec.structs.replace(config, catalogue=catalogue),
        models=models,
        num_workers=_num_first(config.scheduler.autoscale, arguments.workers),
        num_gateways=arguments.gateways,
        num_schedulers=arguments.schedulers,
    )


def _settings(arguments: argparse.Namespace) -> Config:
    """File and variables, then the command line. The addresses of servers are not for the user to
    set here, since this command starts its own."""
    for name in _OWN_ADDRESSES:
        if name in os.environ:
            raise ConfigError(
                f"{name} is set, but millrace up starts servers of its own. Unset it, or run the "
                "parts with python -m millrace.gateway, scheduler, workers and telemetry."
            )
    config = load_config(arguments.config, os.environ)
    check_exposure(config.metrics)
    given = {"host": arguments.host, "port": arguments.port}
    front = {name: value for name, value in given.items() if value is not None}
    engine = msgspec.structs.replace(config.worker.engine, **_engine_arguments(arguments))
    if engine.kind is EngineKind.OPENAI and not engine.url:
        raise ConfigError("--engine openai needs --engine-url: where a server runs already.")
    return msgspec.structs.replace(
        config,
        catalogue=arguments.catalogue or config.catalogue,
        log_level=arguments.log_level or config.log_level,
        gateway=msgspec.structs.replace(config.gateway, **front),
        scheduler=_scheduler(config.scheduler, arguments.autoscale),
        worker=msgspec.structs.replace(config.worker, engine=engine),
    )


def _engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "kind": arguments.engine and EngineKind(arguments.engine),
        "url": arguments.engine_url,
        "command": arguments.engine_command and _absolute(arguments.engine_command),
        "arguments": arguments.engine_arguments and tuple(shlex.split(arguments.engine_arguments)),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and arguments.engine in (None, EngineKind.REAL, EngineKind.SIMULATED):
        names = ", ".join(f"--engine-{name}" for name in given if name != "kind")
        if names:
            raise ConfigError(f"{names} goes with --engine and the name of another engine.")
    return given


def _absolute(command: str) -> str:
    """A program that is named by its path, or a class by its file, is looked for from here."""
    return str(Path(command).expanduser().resolve()) if "/" in command else command


def _engine(config: EngineConfig) -> CatalogueEngine | None:
    """What the catalogue of this system says of the engine, so that every part knows it."""
    if config.kind is EngineKind.REAL:
        return None
    return CatalogueEngine(
        kind=config.kind,
        url=config.url,
        command=config.command,
        arguments=config.arguments,
        served_name=config.served_name,
    )


def _scheduler(config: SchedulerConfig, bounds: str | None) -> SchedulerConfig:
    if bounds is None:
        return config
    fewest, most = parse_bounds(bounds, _MOST_WORKERS)
    autoscale = msgspec.structs.replace(config.autoscale, min_workers=fewest, max_workers=most)
    return msgspec.structs.replace(config, autoscale=autoscale)


def _num_first(autoscale: AutoscaleConfig, asked: int | None) -> int:
    """Workers per model at first. One at least, since the start is over when each model has
    answered."""
    if not autoscale.max_workers:
        return asked or 1
    if not 0 <= autoscale.min_workers <= autoscale.max_workers:
        raise ConfigError(
            f"scheduler.autoscale: min_workers is {autoscale.min_workers}, which is not between 0 "
            f"and max_workers, {autoscale.max_workers}."
        )
    if (asked or 1) > autoscale.max_workers:
        raise MillraceError(
            f"--workers {asked} is more than autoscaling allows, which is {autoscale.max_workers}"
        )
    return max(asked or 1, autoscale.min_workers)


async def _run(plan: Plan) -> int:
    from millrace.cli.local.stack import Stack
    from millrace.cli.local.supervisor import StartError, Supervisor

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # What the user set is in the configuration file of the parts; a variable would override it.
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    supervisor = Supervisor(plan.data / "run", plan.data / "logs", _say, env)
    stack = Stack(plan, supervisor, _say)
    starting = asyncio.create_task(stack.start())
    stopping = asyncio.create_task(stop.wait())
    _say(f"Millrace is starting; logs are in {_shown(plan.data / 'logs')}")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _say(greeting(starting.result(), plan))
            await stopping
    except (StartError, OSError, TimeoutError) as error:
        print(f"millrace up: {error or 'a test request was not answered'}", file=sys.stderr)
        return 1
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        _say("stopping")
        await stack.close()
        await supervisor.stop(_STOP_WITHIN_S)
    return 0


def greeting(endpoints: Endpoints, plan: Plan) -> str:
    """What to tell whoever started it: where everything is, and a first request to try."""
    from millrace.cli.local.scrape_targets import FILE_NAME
    from millrace.cli.local.stack import CLICKHOUSE_URL_FILE, NATS_URL_FILE
    from millrace.gateway.tenancy.identity import demands_keys

    question = '"messages":[{"role":"user","content":"What is TTFT?"}]'
    body = f'{{"model":"{plan.models[0]}","stream":true,{question}}}'
    keys, header = "", ""
    if demands_keys(plan.config.gateway):
        data = shlex.quote(_shown(plan.data))
        keys = (
            "\n  API keys     are demanded. Make one, with --admin for the operations page:\n"
            f"               millrace keys create --tenant NAME --data {data}\n"
        )
        header = " -H 'Authorization: Bearer mr-…'"
    return f"""
Millrace is ready.

  chat page    {endpoints.http}/
  operations   {endpoints.http}/ops
  OpenAI API   {endpoints.http}/v1
  metrics      {_shown(plan.data / "run" / FILE_NAME)} says where, to Prometheus too
  services     find NATS, with its password, in {_shown(plan.data / "run" / NATS_URL_FILE)}
  analysts     find ClickHouse likewise in {_shown(plan.data / "run" / CLICKHOUSE_URL_FILE)}
{keys}
  curl -N {endpoints.http}/v1/chat/completions -H 'Content-Type: application/json'{header} \\
    -d '{body}'

Ctrl-C stops everything.
"""


def _take_lock(lock: TextIO, data: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise MillraceError(
            f"Millrace already runs on {_shown(data)} (pid {lock.read().strip()}). "
            "Stop it, or give another folder with --data."
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _shown(path: Path) -> str:
    """A path as a person would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _say(text: str) -> None:
    print(text, flush=True)
