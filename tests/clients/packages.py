"""Installs packages of other people under ``.cache/clients``, once for each set of versions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.repository import ROOT

_CACHE = ROOT / ".cache" / "clients"
_INSTALL_TIMEOUT_S = 900.0


def need(*programs: str) -> None:
    """Skip the test if the machine lacks one of ``programs``, such as npm, cargo, go or mvn."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"this test needs {', '.join(missing)}")


def installed(name: str, sources: Sequence[Path], *commands: Sequence[str]) -> Path:
    """Return the folder in which the packages of a client are installed.

    ``sources`` are files that pin the packages, and the programs that use them: package.json,
    Cargo.toml, pom.xml, go.mod, a folder of sources. They are copied into the folder, and
    ``commands`` run there. Both are part of the folder's name, so a change of either installs anew.
    Several test processes may ask at once: one installs, the others wait for it.

    Raises AssertionError with the output of a command that fails.
    """
    digest = hashlib.sha256(repr(commands).encode())
    for source in sources:
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file():
                digest.update(file.relative_to(source.parent).as_posix().encode() + b"\0")
                digest.update(file.read_bytes())
    folder = _CACHE / f"{name}-{digest.hexdigest()[:12]}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = folder / ".installed"
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for source in sources:
                if source.is_dir():
                    shutil.copytree(source, folder / source.name)
                else:
                    shutil.copy(source, folder)
            for command in commands:
                _run(command, folder)
            marker.touch()
    return folder


def python_packages(name: str, *packages: str) -> Path:
    """Return the ``bin`` folder of a virtual environment that has the pinned ``packages``."""
    folder = installed(
        name,
        (),
        (sys.executable, "-m", "venv", "environment"),
        ("environment/bin/python", "-m", "pip", "install", "--quiet", *packages),
    )
    return folder / "environment" / "bin"


def npm_packages(name: str, *packages: str) -> Path:
    """Return the folder whose ``node_modules`` has the pinned ``packages``, as ``name@version``."""
    npm = ("npm", "install", "--silent", "--no-audit", "--no-fund")
    return installed(name, (), ("npm", "init", "--yes", "--silent"), (*npm, *packages))


def _run(command: Sequence[str], folder: Path) -> None:
    # The packages of this project are not those of the client.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_INSTALL_TIMEOUT_S,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{' '.join(command)} failed in {folder}:\n{output[-4000:]}"
