"""Forks ranks and engines from a process that has imported torch.

Nine tenths of the CPU time of a rank in a test are its imports. ``WarmProcess`` takes the place of
``subprocess.Popen`` in this process: it has a server, which it starts once, fork the modules of
``_MODULES``, and starts other commands as ever. A fork is a child of the process that asked for
it, so that it is waited for, signalled and ended with its parent like any other. The settings of
threads are those of the server: tests of them need a process that starts anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from millrace.engine.torch_start import import_torch

_ROOT = Path(__file__).parents[3]
_MODULES = frozenset(
    {
        "millrace.engine.parallel.member",
        "millrace.workers.process.engine_process",
    }
)
_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 1 << 16
_MAX_FDS = 16
# Above the numbers that files of a process of tests have.
_SPARE_FD = 500


class Server:
    """The process that forks. It ends when its socket is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
            )
        assert self._socket.recv(1), "the server of warm processes ended"

    def fork(self, command: list[str], environment: dict[str, str], fds: tuple[int, ...]) -> int:
        """The process of a fork that runs a module, with its arguments. It has our output, and the
        files ``fds`` by the numbers that they have here."""
        numbers = (1, 2, *fds)
        request = json.dumps([command, environment, str(Path.cwd()), numbers]).encode()
        # The fork's first parent ends at once: the fork is then a child of this process.
        with self._lock, _adopting():
            socket.send_fds(self._socket, [request], numbers)
            answer = self._socket.recv(_MAX_REQUEST_BYTES)
        assert answer, "the server of warm processes ended"
        return int(answer)

    def stop(self) -> None:
        """End the server; its forks live on."""
        self._socket.close()
        self._process.wait()


class WarmProcess(subprocess.Popen[Any]):
    """A process that was started anew, or forked if it runs one of ``_MODULES``."""

    server: ClassVar[Server]

    # In CPython 3.11 to 3.14 ``others`` are (executable, preexec_fn, close_fds, pass_fds, cwd, env,
    # startupinfo, creationflags, shell, six files of pipes, ...).
    def _execute_child(self, args: Any, *others: Any) -> None:
        command = list(args) if isinstance(args, list | tuple) else []
        if command[:1] != [sys.executable] or command[1:3] != ["-P", "-m"]:
            command = []
        if not _MODULES.intersection(command[3:4]):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        self.pid = self.server.fork(command[3:], environment=others[5], fds=tuple(others[3]))
        self._child_created = True
        self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]


@contextmanager
def warm_server() -> Iterator[None]:
    """``WarmProcess`` can be used meanwhile."""
    WarmProcess.server = Server()
    try:
        yield
    finally:
        WarmProcess.server.stop()


@contextmanager
def _adopting() -> Iterator[None]:
    """A process whose parent, a descendant of this process, has ended becomes a child of ours."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _main(fd: int) -> None:
    import_torch()

    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=fd)
    control.send(b"1")
    while True:
        request, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, _MAX_FDS)
        if not request:
            return
        pid_out, pid_in = os.pipe()
        go_out, go_in = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(pid_in, str(pid).encode())
                os._exit(0)
            for unused in (control.detach(), pid_out, pid_in, go_in):
                os.close(unused)
            os.read(go_out, 1)
            os.close(go_out)
            command, environment, folder, numbers = json.loads(request)
            os._exit(_run(command, environment, folder, dict(zip(numbers, fds, strict=True))))
        os.waitpid(between, 0)
        # The fork is a child of the process that asked for it, and begins.
        control.send(os.read(pid_out, 32))
        for used in (pid_out, pid_in, go_out, go_in, *fds):
            os.close(used)


def _run(command: list[str], environment: dict[str, str], folder: str, fds: dict[int, int]) -> int:
    """The exit code."""
    spare = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _SPARE_FD) for number, fd in fds.items()
    }
    for fd in fds.values():
        os.close(fd)
    for number, fd in spare.items():
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    code = 0
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (as Python itself ends)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _main(int(sys.argv[1]))
