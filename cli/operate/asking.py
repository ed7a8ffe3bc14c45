"""What commands have a running system do, and how they name things to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millrace.cli.operate.status import nothing_runs
from millrace.cli.running import supervising
from millrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from millrace.cli.local.control import ControlDone, Request, SystemReport


def change(data: Path, request: Request) -> int:
    """Have it done, and say what was. Raises what ``ask_system`` does."""
    from millrace.cli.local.control import ControlDone

    done = ask_system(data, request, None)  # weights may take minutes to load
    assert isinstance(done, ControlDone)
    print(done.text)
    return 0


def ask_system(data: Path, request: Request, timeout_s: float | None) -> SystemReport | ControlDone:
    """Raises ConfigError if nothing runs there, and what ``ask`` does."""
    from millrace.cli.local.control import ask

    if supervising(data) is None:
        raise ConfigError(nothing_runs(data))
    return ask(data, request, lambda text: print(f"{text} …", flush=True), timeout_s)


def from_anywhere(path_or_name: str) -> str:
    """Return a path as the system, which runs in another folder, finds it; a name and an empty text
    as they are."""
    if not path_or_name:
        return ""
    path = Path(path_or_name).expanduser()
    is_path = "/" in path_or_name and (path.exists() or path_or_name[0] in "./~")
    return str(path.resolve()) if is_path or path.is_file() or path.is_dir() else path_or_name
