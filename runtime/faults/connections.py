"""Connections of client libraries: one error type, and sockets that notice a dead peer."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any

_NUM_PROBES = 2


class BrokenConnectionError(ConnectionError):
    """Undocumented failure of a client library, such as uvloop's RuntimeError for a closed handle.

    Its cause is the original error.
    """


class ConnectionErrors:
    """Context in which a library uses a connection.

    ``OSError`` and the ``documented`` errors pass unchanged. Any other error, and a cancellation
    that does not come from this task's own ``cancel``, becomes a BrokenConnectionError.
    """

    __slots__ = ("_documented",)

    def __init__(self, *documented: type[Exception]) -> None:
        self._documented: tuple[type[Exception], ...] = (OSError, *documented)

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, self._documented):
            return
        if isinstance(error, asyncio.CancelledError):
            if _is_cancelled():
                return
        elif not isinstance(error, Exception):
            return
        raise BrokenConnectionError(f"The connection broke: {error!r}.") from error


def _is_cancelled() -> bool:
    """Return whether this task was cancelled by its ``cancel``; False without a task, as in a
    thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def silence_options(timeout_s: float) -> list[tuple[int, int, int]]:
    """Return ``setsockopt`` options that end a TCP connection to a silent peer.

    The kernel ends it after about ``timeout_s`` seconds without acknowledgements of data or
    keepalive probes. Some options exist on Linux only.
    """
    probe_every_s = max(1, round(timeout_s / (1 + _NUM_PROBES)))
    named = (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", probe_every_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", probe_every_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", _NUM_PROBES),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(timeout_s * 1e3)),
    )
    return [
        (level, getattr(socket, name), value)
        for level, name, value in named
        if hasattr(socket, name)
    ]


def bound_silence(connected: Any, timeout_s: float) -> None:
    """Set ``silence_options`` on a TCP socket or asyncio's wrapper of one; ignore other
    families."""
    if connected is not None and connected.family in {socket.AF_INET, socket.AF_INET6}:
        for option in silence_options(timeout_s):
            connected.setsockopt(*option)
