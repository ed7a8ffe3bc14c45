"""Compiler of the CPU kernels, run once per machine.

    python -m millrace.engine.kernels.build

compiles them ahead of time. Otherwise the first engine on a machine does.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.runtime.binaries import cache_folder
from millrace.schemas.errors import MillraceError

_FOLDER = Path(__file__).with_name("native")
_KERNELS = "cpu_kernels"
_PRODUCTS = "products"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++20", "-O2", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC"),
)
_COMPILE_TIMEOUT_S = 180.0
_MAX_SHOWN_CHARACTERS = 500

_log = logging.getLogger(__name__)


class KernelBuildError(MillraceError, code="kernels_not_built"):
    """Failure to compile the CPU kernels; the message has the reason."""


def cpu_library() -> Path:
    """Return the library of kernels for this machine's CPU, and compile it if it is missing.

    Needs a C++ compiler (``CXX``, else c++, g++ or clang++ on the PATH). Raises KernelBuildError.
    """
    return _library(_KERNELS, _FLAGS)


def products_library(*more_flags: str) -> Path:
    """Return the library of the products alone, like ``cpu_library``.

    ``more_flags`` of the compiler can disable instructions that the CPU has.
    """
    return _library(_PRODUCTS, (*_FLAGS, *more_flags))


def _library(unit: str, flags: tuple[str, ...]) -> Path:
    compiler = _compiler()
    target = _cache_folder() / f"{unit}-{_fingerprint(compiler, flags)}.so"
    if not target.is_file():
        with _locked(target):
            if not target.is_file():
                _compile(compiler, flags, _FOLDER / f"{unit}.cpp", target)
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Lock a library against other processes of this machine.

    Compiling takes half a minute of a core, and workers that start together would each compile.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise KernelBuildError(f"The CPU kernels could not be compiled: {error}") from error


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise KernelBuildError(
        f"There is no C++ compiler: {chosen or ', '.join(_COMPILERS)} not on the PATH."
    )


def _cache_folder() -> Path:
    try:
        return cache_folder()
    except RuntimeError as error:  # a user without a home
        raise KernelBuildError(f"There is no folder for the CPU kernels: {error}") from error


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Hash everything that the library depends on, so that no version runs a stale library."""
    digest = hashlib.sha256()
    for file in sorted(_FOLDER.iterdir()):
        digest.update(file.read_bytes())
    for text in (compiler, str(flags), _version(compiler), platform.machine(), _cpu_flags()):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _version(compiler: str) -> str:
    status = Path(compiler).resolve().stat()
    return f"{Path(compiler).resolve()} {status.st_size} {status.st_mtime_ns}"


def _cpu_flags() -> str:
    """Return the CPU's instruction sets, as flags of the compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Compile to a temporary file and rename it, so that a process never loads half a file."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            started_s = time.monotonic()
            done = subprocess.run(  # noqa: S603 (the compiler of this machine, our own source)
                [compiler, *flags, "-o", str(made), str(source)],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                why = done.stderr.strip()[:_MAX_SHOWN_CHARACTERS]
                raise KernelBuildError(f"{compiler} could not compile the CPU kernels: {why}")
            made.replace(target)
            _log.info("compiled the CPU kernels in %.1f s", time.monotonic() - started_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"The CPU kernels could not be compiled: {error}") from error


def main() -> int:
    """Compile ahead of time, or report that the engine will use torch alone."""
    try:
        sys.stdout.write(f"CPU kernels: {cpu_library()}\n")
    except KernelBuildError as error:
        sys.stdout.write(f"{error.message} The engine computes with torch alone, more slowly.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
