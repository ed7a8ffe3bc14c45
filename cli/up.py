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

from schemas.errors import MillraceError

if TYPE_CHECKING:
    from cli.endpoints import Endpoints
    from cli.stack import Plan

_STOP_WITHIN_S = 9.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace up``."""
    parser = subparsers.add_parser("up", help="run everything on this machine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address of the gateway")
    parser.add_argument("--port", type=int, default=8000, help="port of the gateway")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder for all state")
    parser.add_argument(
        "--model",
        action="extend",
        nargs="+",
        metavar="NAME|PATH",
        help="a model of the catalogue or a folder in Hugging Face layout (default: demo)",
    )
    parser.add_argument("--workers", type=int, default=1, help="workers per model")
    parser.add_argument("--gateways", type=int, default=1, help="gateways that share the port")
    parser.add_argument("--catalogue", default="", help="a models.yaml instead of the built-in one")
    parser.add_argument("--log-level", default="info")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; 0 after an orderly stop, 1 if a part did not start."""
    for name in ("workers", "gateways"):
        if getattr(arguments, name) < 1:
            raise MillraceError(f"--{name} must be at least 1")
    data: Path = arguments.data.resolve()
    (data / "run").mkdir(parents=True, exist_ok=True)
    with (data / "run" / "up.pid").open("a+") as lock:
        _take_lock(lock, data)
        try:
            return asyncio.run(_run(_plan(arguments, data)))
        finally:
            lock.truncate(0)


def _plan(arguments: argparse.Namespace, data: Path) -> Plan:
    from cli.models import catalogue_for
    from cli.stack import Plan

    catalogue, models = catalogue_for(
        arguments.catalogue, arguments.model or ["demo"], data / "run" / "models.yaml"
    )
    return Plan(
        data=data,
        host=arguments.host,
        port=arguments.port,
        models=models,
        num_workers=arguments.workers,
        num_gateways=arguments.gateways,
        catalogue=catalogue,
        log_level=arguments.log_level,
    )


async def _run(plan: Plan) -> int:
    from cli.stack import Stack
    from cli.supervisor import StartError, Supervisor

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    supervisor = Supervisor(plan.data / "run", plan.data / "logs", _say)
    stack = Stack(plan, supervisor, _say)
    starting = asyncio.create_task(stack.start())
    stopping = asyncio.create_task(stop.wait())
    _say(f"Millrace is starting; logs are in {_shown(plan.data / 'logs')}")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _greet(starting.result(), plan)
            await stopping
    except (StartError, OSError, TimeoutError) as error:
        print(f"millrace up: {error or 'a test request was not answered'}", file=sys.stderr)
        return 1
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        _say("stopping")
        await supervisor.stop(_STOP_WITHIN_S)
        (plan.data / "run" / "endpoints.json").unlink(missing_ok=True)
    return 0


def _greet(endpoints: Endpoints, plan: Plan) -> None:
    question = '"messages":[{"role":"user","content":"What is TTFT?"}]'
    body = f'{{"model":"{plan.models[0]}","stream":true,{question}}}'
    _say(
        f"""
Millrace is ready.

  chat page    {endpoints.http}/
  operations   {endpoints.http}/ops
  OpenAI API   {endpoints.http}/v1

  curl -N {endpoints.http}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

Ctrl-C stops everything.
"""
    )


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
