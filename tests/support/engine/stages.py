"""``millrace stages`` as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO
from unittest.mock import patch

import psutil

from millrace.cli.main import main
from tests.support.engine.warm_processes import WarmProcess, warm_server
from tests.support.processes import children_by_age

_ENDS_WITHIN_S = 15.0


class Stages:
    """Running ``millrace stages``, whose ranks have one thread each. ``log``: its log file."""

    _MODULE: tuple[str, ...] = ("millrace", "stages")

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = _start(output, (*self._MODULE, *arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the current ranks in start order."""
        try:
            return children_by_age(self.pid)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process has ended by itself, and kill it if it does not."""
        try:
            return self._process.wait(_ENDS_WITHIN_S)
        finally:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()


class WarmStages(Stages):
    """The same with ranks that are forks of its first child, which has imported torch."""

    _MODULE = (__name__,)

    def ranks(self) -> list[psutil.Process]:
        return super().ranks()[1:]


def _start(output: IO[bytes], arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=output,
        stderr=output,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _main() -> int:
    with warm_server(), patch.object(subprocess, "Popen", WarmProcess):
        return main(["stages", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(_main())
