"""``millrace up``: all of Millrace on one machine, from packages alone."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from millrace.cli.adapter_options import (
    add_adapter_option,
    name_and_source,
    offered_adapter,
    split_model,
)
from millrace.cli.arguments import path_or_name, shown_path, whole_number
from millrace.cli.endpoints import add_data_argument, read_endpoints
from millrace.cli.engine_arguments import (
    FirstWorkers,
    add_other_engine,
    add_own_engine,
    num_first,
    parse_bounds,
    told_engine,
    workers_option,
)
from millrace.cli.local.private_files import make_private
from millrace.cli.running import PID_FILE, lasting, own_line, supervising
from millrace.runtime.metrics_server import check_exposure
from millrace.runtime.settings import PREFIX, load_config, names_setting
from millrace.schemas.config import GatewayConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from millrace.cli.local.stack import Plan
    from millrace.registry.catalogue import Catalogue
    from millrace.schemas.config import Config, KafkaConfig, SchedulerConfig
    from millrace.schemas.models.adapters import Adapter
    from millrace.telemetry.kafka.apache.broker import KafkaProgram

_STOP_WITHIN_S = 9.0
# Each worker is a process of this machine.
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
    parser = subparsers.add_parser(
        "up",
        help="run everything on this machine",
        description="Run all of Millrace on this machine, from packages alone: gateways, "
        "schedulers, workers, telemetry and their servers. It runs until Ctrl-C, SIGTERM or "
        "millrace down; its data is kept in DIR.",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--host", help="address of the gateway (default: 127.0.0.1)")
    where.add_argument(
        "--port",
        type=whole_number,
        help="port of the gateway, which must be free; 0: any free port (default: 8000, or the "
        "next free one)",
    )
    add_data_argument(where)
    _add_models(parser.add_argument_group("models"))
    add_other_engine(parser.add_argument_group("engines of others"))
    _add_size(parser.add_argument_group("size"))
    settings = parser.add_argument_group("settings")
    settings.add_argument(
        "--kafka",
        choices=("embedded", "apache"),
        help="the Kafka to start: embedded, a stand-in in memory for clients of librdkafka and "
        "aiokafka, or apache, Apache Kafka for all clients, which needs Java 17 (default: "
        "embedded; docs/kafka.md)",
    )
    settings.add_argument(
        "--config", type=path_or_name, help="a YAML or TOML file of settings for all parts"
    )
    settings.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    parser.set_defaults(handler=run)


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        action="extend",
        nargs="+",
        type=path_or_name,
        metavar="NAME|PATH",
        help="a model of the catalogue, a folder in Hugging Face layout or a GGUF file "
        "(default: demo)",
    )
    group.add_argument(
        "--catalogue", type=path_or_name, help="a models.yaml instead of the built-in one"
    )
    group.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        help="engine of the models: Millrace's own (real), the simulated engine, which computes no "
        "model (simulated), or a server of another engine, started here (default: real)",
    )
    add_own_engine(group)
    add_adapter_option(
        group,
        "requests name the adapter as their model; write MODEL:NAME=PATH if "
        "there are several models",
    )


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=workers_option,
        metavar="N|ROLE:N,ROLE:N",
        help="workers per model, with --autoscale at first (default: 1), or a number for each "
        "role: prefill:1,decode:2 computes long prompts apart from streams (docs/kv-cache.md)",
    )
    group.add_argument(
        "--autoscale",
        metavar="MIN:MAX",
        help="let the schedulers set the number of workers per model, from MIN to MAX; MIN 0: "
        "none for an idle model",
    )
    group.add_argument(
        "--switch-roles",
        action="store_true",
        help="let schedulers change the roles of --workers by the load of each role",
    )
    group.add_argument(
        "--gateways",
        type=whole_number,
        default=1,
        help="number of gateways, which share the port (default: 1)",
    )
    group.add_argument(
        "--schedulers",
        type=whole_number,
        default=1,
        help="number of schedulers, which share the work (default: 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM. Return 0 after an orderly stop, 1 if a part did not start."""
    counts = {"gateways": arguments.gateways, "schedulers": arguments.schedulers}
    if arguments.workers is not None:
        counts["workers"] = arguments.workers.number
    for name, count in counts.items():
        if count < 1:
            raise MillraceError(f"--{name} must be at least 1")
    data: Path = arguments.data.resolve()
    # Files of the servers are private to this user; the servers inherit this umask.
    usual = os.umask(0o077)
    try:
        return _run_private(arguments, data)
    finally:
        os.umask(usual)


def _run_private(arguments: argparse.Namespace, data: Path) -> int:
    try:
        make_private(data / "run")
    except OSError as error:
        raise ConfigError(f"--data {shown_path(data)} cannot be used: {error.strerror}.") from error
    with (data / "run" / PID_FILE).open("a+") as lock:
        _take_lock(lock, data)
        try:
            return asyncio.run(_run(_plan(arguments, data)))
        finally:
            lock.truncate(0)


def _plan(arguments: argparse.Namespace, data: Path) -> Plan:
    from millrace.cli.local import models as local_models
    from millrace.cli.local.live import StartingModels
    from millrace.cli.local.stack import Plan
    from millrace.registry.catalogue import load_catalogue

    config = _settings(arguments)
    saved = local_models.read_saved(data)
    wanted, added, said = local_models.models_to_run(arguments.model, "demo", saved)
    for line in said:
        _say(line)
    engine = local_models.engine_of_all(config.worker.engine)
    file = data / "run" / local_models.SERVED_FILE
    catalogue, models = local_models.catalogue_for(config.catalogue, wanted, file, engine, added)
    known, entries = load_catalogue(config.catalogue), load_catalogue(catalogue)
    for model in models:
        if message := local_models.engine_message(entries.get(model)):
            _say(message)
        # Report a setting that the model's engine does not support before anything starts.
        entries.get(model).engine_config(config.worker.engine)
    named = {known.entry_for(model).name for model in wanted}
    first = arguments.workers or FirstWorkers(1)
    if first.roles:
        _check_roles(config)
    elif arguments.switch_roles:
        raise ConfigError("--switch-roles takes --workers with roles, such as prefill:1,decode:2.")
    num_workers = num_first(config.scheduler.autoscale, first.number)
    return Plan(
        data=data,
        config=msgspec.structs.replace(config, catalogue=catalogue),
        models=models,
        serving=StartingModels(
            known=known,
            entries={name: entries.get(name) for name in models},
            saved=local_models.without(saved, named),
            engine=engine,
            workers=num_workers,
        ),
        port_is_fixed=_is_port_fixed(arguments, config),
        num_workers=num_workers,
        roles=first.roles,
        num_gateways=arguments.gateways,
        num_schedulers=arguments.schedulers,
        adapters=_adapters(arguments.adapter, entries),
        kafka=_kafka_program(config.kafka),
    )


def _kafka_program(config: KafkaConfig) -> KafkaProgram | None:
    """Find or download the program of Apache Kafka, if the settings ask for it."""
    if config.server != "apache":
        return None
    from millrace.telemetry.kafka.apache.broker import KafkaProgram
    from millrace.telemetry.kafka.apache.jars import fetch_jars
    from millrace.telemetry.kafka.apache.java import find_java

    java = find_java()
    return KafkaProgram(java, asyncio.run(fetch_jars(config.maven_url, _say)))


def _check_roles(config: Config) -> None:
    """Raise ConfigError if streams cannot continue at decode workers with this configuration."""
    if config.worker.engine.kind is not EngineKind.REAL:
        raise ConfigError(
            "--workers: roles are for Millrace's own engine, from which blocks can be pulled; give "
            "a number."
        )


def _adapters(options: list[str], models: Catalogue) -> tuple[Adapter, ...]:
    adapters = []
    for option in options:
        name, source = name_and_source(option)
        model, own_name = split_model(name, models)
        adapters.append(offered_adapter(models, own_name, source, model=model))
    return tuple(adapters)


def _settings(arguments: argparse.Namespace) -> Config:
    """Read the configuration from file and variables, then the command line.

    The user cannot set addresses of servers here, since this command starts its own.
    """
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
    engine = told_engine(config.worker.engine, arguments)
    server = arguments.kafka or config.kafka.server
    return msgspec.structs.replace(
        config,
        catalogue=arguments.catalogue or config.catalogue,
        log_level=arguments.log_level or config.log_level,
        gateway=msgspec.structs.replace(config.gateway, **front),
        kafka=msgspec.structs.replace(config.kafka, server=server),
        scheduler=_scheduler(config.scheduler, arguments),
        worker=msgspec.structs.replace(config.worker, engine=engine),
    )


def _is_port_fixed(arguments: argparse.Namespace, config: Config) -> bool:
    """Return whether the user set the gateway's port; the default port may give way to the next
    free one."""
    return (
        arguments.port is not None
        or names_setting("gateway.port", os.environ)
        or config.gateway.port != GatewayConfig().port
    )


def _scheduler(config: SchedulerConfig, arguments: argparse.Namespace) -> SchedulerConfig:
    if arguments.switch_roles:
        config = msgspec.structs.replace(config, switch_roles=True)
    if arguments.autoscale is None:
        return config
    fewest, most = parse_bounds(arguments.autoscale, _MOST_WORKERS)
    autoscale = msgspec.structs.replace(config.autoscale, min_workers=fewest, max_workers=most)
    return msgspec.structs.replace(config, autoscale=autoscale)


async def _run(plan: Plan) -> int:
    from millrace.cli.greeting import greeting
    from millrace.cli.local.control import ControlServer
    from millrace.cli.local.log_files import CHECK_EVERY_S, UpLog, bound_logs
    from millrace.cli.local.stack import Stack
    from millrace.cli.local.supervisor import StartError, Supervisor
    from millrace.runtime.clock import SystemClock
    from millrace.runtime.tasks import Tasks

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # The user's settings are in the parts' configuration file; a variable would override it.
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    logs = plan.data / "logs"
    make_private(logs)
    log = UpLog(logs)
    supervisor = Supervisor(plan.data / "run", logs, log.say, env, warn=log.warn)
    stack = Stack(plan, supervisor, log.say)
    control = ControlServer(plan.data / "run", stack.live.handle)
    await control.start()
    chores = Tasks()
    chores.repeat(
        lambda: asyncio.to_thread(bound_logs, logs), CHECK_EVERY_S, SystemClock(), "bound the logs"
    )
    starting = asyncio.create_task(stack.start())
    stopping = asyncio.create_task(stop.wait())
    log.say(f"Millrace is starting; logs are in {shown_path(logs)}")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            log.say(greeting(starting.result(), plan, stack.records.why_not_ready))
            log.note(f"ready at {starting.result().http}")
            await stopping
    except (StartError, OSError, TimeoutError) as error:
        why = str(error) or "a test request was not answered"
        log.note(why)
        print(f"millrace up: {why}", file=sys.stderr)
        return 1
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        log.say("stopping")
        await control.close()
        await chores.close()
        await stack.close()
        await supervisor.stop(_STOP_WITHIN_S)
        log.close()
    return 0


def _take_lock(lock: TextIO, data: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise MillraceError(
            f"Millrace already runs on {shown_path(data)}{_who(data)}. See millrace status, stop "
            "it with millrace down, or give another folder with --data."
        ) from error
    lock.truncate(0)
    lock.write(own_line())
    lock.flush()


def _who(data: Path) -> str:
    """Return the pid, uptime and address of the system that has the folder."""
    running = supervising(data)
    if running is None:
        return ""
    endpoints = read_endpoints(data)
    where = "starting" if endpoints is None else endpoints.http
    return f" (pid {running.pid}, for {lasting(running.up_s)}, {where})"


def _say(text: str) -> None:
    print(text, flush=True)
