"""A connection that waits for one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.gateway.streams.stream import Client, OpenStream
from millrace.gateway.transport.http import Receive, wait_for_disconnect
from millrace.schemas.records import ClientEnd

ABORT_EXTENSION = "millrace.abort"


class HttpClient(Client):
    """``gone`` says why, once the connection was closed or dropped; ``going_away`` that this
    gateway shuts down and the client is to be told. ``on_wake`` is called when there is something
    to take; without another one, ``wait`` returns. ``takes_event_ids``: the events of a stream are
    to say where it is."""

    def __init__(
        self, limit_bytes: int, abort: Callable[[], None], *, takes_event_ids: bool = False
    ) -> None:
        super().__init__(limit_bytes)
        self.takes_event_ids = takes_event_ids
        self._abort = abort
        self._wakeup = asyncio.Event()
        self.gone = ""
        self.going_away = False
        self.on_wake: Callable[[], None] | None = None

    def wake(self, _stream: OpenStream) -> None:
        (self.on_wake or self._wakeup.set)()

    def call(self) -> None:
        """Have ``wait`` return."""
        self._wakeup.set()

    def has_left(self) -> bool:
        return bool(self.gone)

    def drop(self, reason: str) -> None:
        self.disconnect(reason)
        self._abort()

    def go_away(self) -> None:
        self.going_away = True
        self._wakeup.set()

    def disconnect(self, reason: str) -> None:
        self.gone = self.gone or reason
        self._wakeup.set()

    async def wait(self) -> None:
        """Return when there is something to take, or nobody to take it."""
        await self._wakeup.wait()
        self._wakeup.clear()

    async def wait_up_to(self, timeout_s: float) -> bool:
        """Like ``wait``; False if nothing happened in time."""
        is_late = False

        def on_late() -> None:
            nonlocal is_late
            if not self._wakeup.is_set():
                is_late = True
                self._wakeup.set()

        timer = asyncio.get_running_loop().call_later(timeout_s, on_late)
        try:
            await self.wait()
        finally:
            timer.cancel()
        return not is_late

    async def watch(self, receive: Receive) -> None:
        """Note that the client closes its connection. Runs until then."""
        await wait_for_disconnect(receive)
        self.disconnect(ClientEnd.DISCONNECTED)
