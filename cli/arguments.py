"""Argument types and options shared by several commands: paths, numbers, times, an SLO, reports."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from millrace.bench.settings import Slo


def as_path(text: str) -> Path:
    """Parse a path argument. Raises argparse.ArgumentTypeError."""
    return Path(path_or_name(text))


def path_or_name(text: str) -> str:
    """Parse an argument that is a path or a name. An empty text is refused, since it would mean the
    current folder.

    Raises argparse.ArgumentTypeError.
    """
    if not text:
        raise argparse.ArgumentTypeError(
            "it is empty; leave the option out, or write . for the current folder"
        )
    return text


def shown_path(path: Path) -> str:
    """Return a path as a person would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


_MOST = 2**31 - 1


def whole_number(text: str) -> int:
    """Parse a whole number of at most ``_MOST`` in size. Raises argparse.ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None
    if abs(value) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is above {_MOST}")
    return value


def seconds_to_wait(text: str) -> float:
    """Parse a maximum waiting time. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is no number of seconds") from None
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be 0 seconds or more")
    return value


SPREAD = "N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MAX]"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "": 1.0}


def add_report_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare ``--slo``, ``--json`` and ``--html``."""
    group.add_argument("--slo", metavar="TTFT=…,TPOT=…,E2E=…", help="such as ttft=200ms,tpot=50ms")
    group.add_argument("--json", type=as_path, metavar="FILE", help="write the report to this file")
    group.add_argument(
        "--html", type=as_path, metavar="FILE", help="write the report as an HTML page with plots"
    )


def check_folders(*files: Path | None) -> None:
    """Raise ConfigError for a file whose folder does not exist, before the report is computed."""
    for path in files:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is no folder, so {path.name} cannot go there")


def parse_slo(text: str) -> Slo:
    """Parse any of ``ttft=200ms,tpot=50ms,e2e=5s``. Raises ConfigError."""
    from millrace.bench.settings import Slo

    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().lower().partition("=")
        if name not in {"ttft", "tpot", "e2e"}:
            raise ConfigError(f"--slo: {name!r} is none of ttft, tpot and e2e")
        bounds[f"{name}_ms"] = seconds(f"--slo {name}", value) * 1e3
    return Slo(**bounds)


def seconds(what: str, text: str) -> float:
    """Parse ``200ms``, ``30s`` or ``5m``. Raises ConfigError, which names ``what``."""
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise ConfigError(f"{what}: {text!r} is no time; write 200ms, 30s or 5m")
    return float(matched[1]) * _UNITS_S[matched[2]]
