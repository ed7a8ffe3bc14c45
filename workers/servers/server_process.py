"""Process of an inference server that the worker starts itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections import deque
from pathlib import Path

from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import ConfigError
from millrace.workers.servers.dialect import Command

_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = _ROOT / ".engines"
_GUARDIAN = Path(__file__).with_name("guardian.py")
_SHOWN_LINES = 20
_ENDS_WITHIN_S = 8.0
_CHUNK_BYTES = 65_536


def find_program(name: str, command: str, package: str) -> Path:
    """Return the path of a server's program: ``command`` if set, else ``name`` from
    ``.engines/bin`` or the ``PATH``.

    Raises:
        ConfigError: there is no such program; the message names the package to install.
    """
    found = shutil.which(command or name, path=None if command else _search_path())
    if found is None:
        raise ConfigError(
            f"There is no program {command or name!r}. Install {package}, or set "
            f"worker.engine.command to the program's path."
        )
    return Path(found)


def _search_path() -> str:
    folders = [str(_INSTALLED / "bin"), os.environ.get("PATH", "")]
    return os.pathsep.join(filter(None, folders))


class ServerProcess:
    """Owner of the server's process group, its socket's folder and the tail of its output.

    It owns them from ``start`` until ``close``. The server ends with the worker, however the worker
    ends.
    """

    def __init__(self, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder
        self._tail: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._tasks = Tasks()
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline = -1
        self._is_loading = True

    @classmethod
    def prepare(cls) -> ServerProcess:
        """Create the object with a folder that only this user can read."""
        return cls(tempfile.TemporaryDirectory(prefix="millrace-engine-"))

    @property
    def folder(self) -> Path:
        """Folder for the server's socket and caches."""
        return Path(self._folder.name)

    @property
    def tail(self) -> str:
        """Last lines that the server printed while it loaded."""
        return "\n".join(self._tail)

    async def start(self, command: Command) -> None:
        """Start the process. Raises ConfigError if the program cannot be run."""
        reading, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(_GUARDIAN), str(reading), str(self.folder)),
                *command.arguments,
                pass_fds=(reading,),
                cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment() | command.environment,
                # A kill of the worker's process group must not reach the guardian.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command.arguments[0]} cannot be run: {error}.") from error
        finally:
            os.close(reading)
        self._tasks.spawn(self._read_output(), "read the server's output")

    def is_ready(self) -> None:
        """Drop the output from now on: a loaded server may print prompts."""
        self._is_loading = False
        self._tail.clear()

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def close(self) -> None:
        """End the process and all its child processes."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process is not None:
            try:
                async with asyncio.timeout(_ENDS_WITHIN_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._tasks.close(timeout_s=1.0)
        self._folder.cleanup()

    async def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            if self._is_loading:
                *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                self._tail.extend(line.decode(errors="replace") for line in lines if line.strip())
                rest = rest[-_CHUNK_BYTES:]


def _environment() -> dict[str, str]:
    """Return our environment without PYTHONPATH: the server's packages are its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
