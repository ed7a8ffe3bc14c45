"""``millrace status``: state of the system on a data folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.endpoints import ENDPOINTS_FILE, add_data_argument
from millrace.cli.running import SOCKET_FILE, lasting, supervising
from millrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from millrace.cli.local.control import ControlDone, Request, SystemReport

WELL, UNWELL, NOT_RUNNING = 0, 1, 3
_ANSWERS_WITHIN_S = 10.0
_MIB = 1 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace status``."""
    parser = subparsers.add_parser(
        "status",
        help="show the parts of the system, their addresses and health",
        description="Show the parts, addresses and models of the system that runs on DIR. The "
        "exit code is 0 if all parts are healthy, 1 if a part is down, starting or unhealthy, and "
        "3 if no system runs there.",
    )
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    add_data_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the state; return WELL, UNWELL or NOT_RUNNING. Raises ControlError if the system does
    not answer."""
    import msgspec

    from millrace.cli.local.control import StatusRequest, SystemReport, ask

    data: Path = arguments.data
    running = supervising(data)
    if running is None:
        if arguments.json:
            print('{"state":"not running","well":false}')
        else:
            print(nothing_runs(data))
        return NOT_RUNNING
    if not (data / "run" / SOCKET_FILE).exists():
        if arguments.json:
            print('{"state":"starting or stopping","well":false}')
        else:
            print(f"Millrace on {data} (pid {running.pid}) is just starting or stopping.")
        return UNWELL
    report = ask(data, StatusRequest(), print, _ANSWERS_WITHIN_S)
    assert isinstance(report, SystemReport)
    if arguments.json:
        print(msgspec.json.encode({**msgspec.to_builtins(report), "well": report.is_well}).decode())
    else:
        print(_as_text(data, report), end="")
    return WELL if report.is_well else UNWELL


def nothing_runs(data: Path) -> str:
    """Return the message that no system runs on ``data`` and how to start it; it differs if the
    system was killed."""
    if (data / "run" / ENDPOINTS_FILE).exists():
        return (
            f"{rests(data)} The system there was killed. Start it again with millrace up --data "
            f"{data}; its accepted requests are kept."
        )
    return f"{rests(data)} Start it with millrace up --data {data}."


def rests(data: Path) -> str:
    """Return the message that no system runs on ``data``."""
    return f"Nothing runs on {data}."


def _as_text(data: Path, report: SystemReport) -> str:
    well = "" if report.is_well or report.state != "running" else ", with problems"
    lines = [
        f"Millrace on {data} is {report.state}{well}: pid {report.pid}, for {lasting(report.up_s)}"
    ]
    if report.addresses:
        lines.append("")
        lines += [f"  {name:<11} {address}" for name, address in report.addresses.items()]
    are_groups = any(part.num_devices > 1 for part in report.parts)
    parts = _table(
        (
            *("part", "pid", "up", "restarts", "memory"),
            *(("devices",) if are_groups else ()),
            *("address", "metrics", "health"),
        ),
        [
            (
                *(part.name, str(part.pid), lasting(part.up_s), str(part.restarts)),
                f"{part.memory_bytes / _MIB:,.0f} MiB",
                *((str(part.num_devices) if part.model else "",) if are_groups else ()),
                *(part.address or "", part.metrics or "", part.health),
            )
            for part in report.parts
        ],
        (False, *[True] * (5 if are_groups else 4), False, False, False),
    )
    requests = _count_requests(report)
    models = _table(
        ("model", "state", "workers", "requests", "engine", "source"),
        [
            (
                *(model.name, model.state, str(model.workers), str(requests(model.name))),
                *(model.engine, model.source),
            )
            for model in report.models
        ],
        (False, False, True, True, False, False),
    )
    return "\n".join([*lines, "", parts, models])


def _count_requests(report: SystemReport) -> Callable[[str], int]:
    parts = report.parts
    return lambda model: sum(part.num_requests or 0 for part in parts if part.model == model)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> str:
    from millrace.runtime.text_table import text_table

    return text_table(names, rows, is_right)


def change(data: Path, request: Request) -> int:
    """Have the system carry out a request and print its result. Raises the errors of
    ``ask_system``."""
    from millrace.cli.local.control import ControlDone

    done = ask_system(data, request, None)  # weights may take minutes to load
    assert isinstance(done, ControlDone)
    print(done.text)
    return 0


def ask_system(data: Path, request: Request, timeout_s: float | None) -> SystemReport | ControlDone:
    """Send a request to the system. Raises ConfigError if no system runs there, and the errors of
    ``ask``."""
    from millrace.cli.local.control import ask

    if supervising(data) is None:
        raise ConfigError(nothing_runs(data))
    return ask(data, request, lambda text: print(f"{text} …", flush=True), timeout_s)


def from_anywhere(path_or_name: str) -> str:
    """Make a path absolute, since the system runs in another folder; return a name or an empty text
    unchanged."""
    if not path_or_name:
        return ""
    path = Path(path_or_name).expanduser()
    is_path = "/" in path_or_name and (path.exists() or path_or_name[0] in "./~")
    return str(path.resolve()) if is_path or path.is_file() or path.is_dir() else path_or_name
