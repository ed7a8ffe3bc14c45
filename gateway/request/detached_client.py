"""In the place of clients that are not there."""

from __future__ import annotations

from collections.abc import Callable

from millrace.gateway.streams.stream import Client, OpenStream


class DetachedClient(Client):
    """Reads in the place of a client that is gone, so that the end is noticed."""

    def __init__(self, on_wake: Callable[[], None]) -> None:
        super().__init__(limit_bytes=2**62)
        self._on_wake = on_wake

    def wake(self, _stream: OpenStream) -> None:
        self._on_wake()

    def drop(self, reason: str) -> None:
        """There is no connection to close."""


# Of streams that have ended, and of those that are read without being woken.
NULL_CLIENT = DetachedClient(lambda: None)
