"""``python guardian.py FD FOLDER COMMAND …``: run a command until the worker dies.

When the pipe ``FD`` is closed, which happens however the worker dies, the guardian ends the command
with all its child processes and removes ``FOLDER``.

Exits as the command does. Imports nothing of Millrace, since the command's packages are its own.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_ENDS_WITHIN_S = 5.0


def main(arguments: list[str]) -> int:
    """Run until the command or the worker ends, and return the exit code."""
    fd, folder = int(arguments[0]), arguments[1]
    os.set_inheritable(fd, False)
    # The worker decides when the server ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    process = subprocess.Popen(  # noqa: S603  (the worker's own command)
        arguments[2:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    ended = os.pidfd_open(process.pid)
    ready, _, _ = select.select([fd, ended], [], [])
    if ended not in ready:
        _signal_group(process.pid, signal.SIGTERM)
        select.select([ended], [], [], _ENDS_WITHIN_S)
    # Child processes of the command may have outlived it.
    _signal_group(process.pid, signal.SIGKILL)
    code = process.wait()
    if fd in ready:
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _die_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
