"""Connections of client libraries: one type of error, and sockets that notice a dead peer."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any

_NUM_PROBES = 2


class BrokenConnectionError(ConnectionError):
    """A client library failed in a way that it does not document, such as uvloop's RuntimeError of
    a handle that is closed. Its cause is that error."""


class ConnectionErrors:
    """A context in which a library uses a connection. Its errors are ``OSError`` and those of
    ``documented``. Any other, and a cancellation that does not come from this task's own
    ``cancel``, leaves the context as BrokenConnectionError."""

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
    """Whether this task was cancelled by its ``cancel``; False where there is no task, as in a
    thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def silence_options(timeout_s: float) -> list[tuple[int, int, int]]:
    """Options, as ``setsockopt`` takes them, with which the kernel ends a TCP connection whose peer
    acknowledges neither data nor, while none is sent, keepalive probes for about ``timeout_s``
    seconds. Systems other than Linux lack some of these options."""
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
    """Set ``silence_options`` on a TCP socket, or on asyncio's stand-in for it. Sockets of other
    families stay as they are."""
    if connected is not None and connected.family in {socket.AF_INET, socket.AF_INET6}:
        for option in silence_options(timeout_s):
            connected.setsockopt(*option)
