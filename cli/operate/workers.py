"""``millrace workers``: list workers with their roles, switch roles, move streams."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from millrace.cli.arguments import seconds_to_wait
from millrace.cli.endpoints import add_data_argument, bus_of
from millrace.cli.store_access import print_columns, print_json
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import MillraceError

if TYPE_CHECKING:
    from millrace.bus.api import Bus
    from millrace.schemas.control import WorkerCommand, WorkerStatus

_COMMAND_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.1
# Nanoseconds without a heartbeat after which a worker counts as ended; an idle worker sends one a
# second.
_SILENT_NS = 3_000_000_000
# Seconds without a departing stream after which a move is over.
_SETTLED_S = 2.5


class NoSuchWorkerError(MillraceError, code="worker_not_found"):
    """Error if no live worker has that name."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace workers`` and its commands."""
    parser = subparsers.add_parser(
        "workers",
        help="list workers, change their roles, and move their streams",
        description="List the workers of a running system, change their roles, and move their "
        "streams to other workers.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", dest="workers_command", required=True)

    listing = commands.add_parser("list", help="who serves what")
    listing.add_argument("--json", action="store_true", help="answer in JSON")
    _add_where(listing, _list)

    drain = commands.add_parser(
        "drain",
        help="drain a worker",
        description="Drain a worker: it accepts no new work, and its streams move to other "
        "workers as far as there is room; the rest end there. It stays, empty, until its process "
        "is stopped. The exit code is 1 if it is not empty in time.",
    )
    drain.add_argument("name", metavar="NAME")
    drain.add_argument(
        "--timeout",
        type=seconds_to_wait,
        default=30.0,
        metavar="S",
        help="seconds to wait until it is empty; 0: do not wait (default: %(default)s)",
    )
    _add_where(drain, _drain)

    move = commands.add_parser(
        "move",
        help="move a worker's streams to other workers now",
        description="Move a worker's streams to other workers of the same model, as far as there "
        "is room. The worker keeps accepting work.",
    )
    move.add_argument("name", metavar="NAME")
    move.add_argument("--to", metavar="OTHER", help="to this worker alone")
    _add_where(move, _move)

    role = commands.add_parser(
        "role",
        help="change the role of a worker",
        description="Let a worker prefer prompts, streams after them, or both alike, while it "
        "serves. Its running requests continue. After a restart it has the role of its "
        "configuration. With scheduler.switch_roles, schedulers may change the role, too.",
    )
    role.add_argument("name", metavar="NAME")
    role.add_argument("role", choices=[one.value for one in WorkerRole])
    _add_where(role, _set_role)


def _add_where(
    parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], int]
) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--nats", metavar="URL", help="the server to use instead")
    add_data_argument(group)
    parser.set_defaults(handler=action)


# --- commands -----------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace) -> int:
    async def show(bus: Bus) -> int:
        workers = await _live(bus)
        if arguments.json:
            print_json([_without_token(status) for status in workers])
        elif workers:
            _print_table(workers)
        else:
            print("no worker is there")
        return 0

    return _on_bus(arguments, show)


def _drain(arguments: argparse.Namespace) -> int:
    async def drain(bus: Bus) -> int:
        from millrace.schemas.control import Drain

        worker = await _find(bus, arguments.name)
        why = await _command(bus, worker, Drain(reason="millrace workers drain"))
        if why:
            raise MillraceError(f"{worker.name} cannot be drained: {why}")
        print(f"{worker.name} takes no new work", flush=True)
        left = _num_held(worker)
        until_s = time.monotonic() + arguments.timeout
        while left and time.monotonic() < until_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            left = await _num_left(bus, worker)
        if arguments.timeout:
            print(f"{left} requests are still there" if left else f"{worker.name} is empty")
        return 1 if left and arguments.timeout else 0

    return _on_bus(arguments, drain)


def _move(arguments: argparse.Namespace) -> int:
    async def move(bus: Bus) -> int:
        from millrace.schemas.control import MoveStreams

        worker = await _find(bus, arguments.name)
        to = None if arguments.to is None else await _find(bus, arguments.to)
        if to is not None and (to.model != worker.model or to.worker_id == worker.worker_id):
            raise MillraceError(
                f"{worker.name} serves {worker.model}: its streams can move to another worker of "
                f"that model, not to {to.name}, which serves {to.model}."
            )
        num_before = _num_held(worker)
        to_worker_id = "" if to is None else to.worker_id
        await bus.control.move_streams(
            MoveStreams(worker_id=worker.worker_id, to_worker_id=to_worker_id)
        )
        left = await _settled(bus, worker)
        place = "" if to is None else f" to {to.name}"
        print(f"{max(num_before - left, 0)} of {num_before} requests left {worker.name}{place}")
        return 0

    return _on_bus(arguments, move)


def _set_role(arguments: argparse.Namespace) -> int:
    async def set_role(bus: Bus) -> int:
        from millrace.schemas.control import SetRole

        worker = await _find(bus, arguments.name)
        role = WorkerRole(arguments.role)
        why = await _command(bus, worker, SetRole(role=role))
        if why:
            raise MillraceError(f"The role of {worker.name} cannot be changed: {why}")
        before = "as before" if worker.role is role else f"it was {worker.role}"
        print(f"the role of {worker.name} is {role}; {before}")
        return 0

    return _on_bus(arguments, set_role)


# --- answers of workers --------------------------------------------------------------------------


async def _live(bus: Bus) -> list[WorkerStatus]:
    """Return the last status of each live worker, by name."""
    now_ns = time.time_ns()
    known = await bus.workers.known()
    live = [status for status in known if now_ns - status.sent_ns <= _SILENT_NS]
    return sorted(live, key=lambda status: (status.model, status.name))


async def _find(bus: Bus, name: str) -> WorkerStatus:
    workers = await _live(bus)
    for status in workers:
        if name in (status.name, status.worker_id):
            return status
    names = ", ".join(status.name for status in workers) or "none"
    raise NoSuchWorkerError(f"There is no worker {name!r:.200}. Workers: {names}.")


async def _command(bus: Bus, worker: WorkerStatus, command: WorkerCommand) -> str:
    """Send a command to a worker; return why it refused, empty if it complied."""
    reply = await bus.control.command(worker.worker_id, command, _COMMAND_TIMEOUT_S)
    if reply is None:
        return "it does not answer"
    return "" if reply.ok else reply.message or reply.reason


async def _num_left(bus: Bus, worker: WorkerStatus) -> int:
    """Return the number of requests at a worker now; 0 if it is gone."""
    for status in await _live(bus):
        if status.worker_id == worker.worker_id:
            return _num_held(status)
    return 0


async def _settled(bus: Bus, worker: WorkerStatus) -> int:
    """Wait until no more requests leave a worker; return the number of the rest."""
    left, since_s = _num_held(worker), time.monotonic()
    while left and time.monotonic() - since_s < _SETTLED_S:
        await asyncio.sleep(_LOOK_EVERY_S)
        now_left = await _num_left(bus, worker)
        if now_left < left:
            left, since_s = now_left, time.monotonic()
    return left


def _without_token(status: WorkerStatus) -> WorkerStatus:
    """Remove the transfer token from a status, which is for peers only."""
    from msgspec.structs import replace

    if status.transfer is None:
        return status
    return replace(status, transfer=replace(status.transfer, token=""))


def _num_held(status: WorkerStatus) -> int:
    return status.num_running + status.num_waiting


def _print_table(workers: list[WorkerStatus]) -> None:
    are_groups = any(status.num_devices > 1 for status in workers)
    devices = ("devices",) if are_groups else ()
    load = ("running", "waiting", "KV", "moves")
    print_columns(
        ("worker", "model", *devices, "role", "state", *load),
        (
            (
                *(status.name, status.model),
                *((str(status.num_devices),) if are_groups else ()),
                *(status.role.value, _state_of(status)),
                f"{status.num_running} of {status.max_num_sequences}",
                str(status.num_waiting),
                _kv_use(status),
                "computed again" if status.transfer is None else "pulled",
            )
            for status in workers
        ),
    )


def _kv_use(status: WorkerStatus) -> str:
    used = status.num_blocks - status.num_free_blocks
    return f"{used / status.num_blocks:.0%}" if status.num_blocks else ""


def _state_of(status: WorkerStatus) -> str:
    if status.engine_down:
        return "loading"
    return "draining" if status.draining else "serving"


def _on_bus(arguments: argparse.Namespace, action: Callable[[Bus], Awaitable[int]]) -> int:
    async def work() -> int:
        async with bus_of(arguments, "millrace-workers") as bus:
            return await action(bus)

    return asyncio.run(work())
