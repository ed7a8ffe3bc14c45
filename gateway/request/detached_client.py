"""In the place of clients that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.streams.stream import Client, OpenStream

if TYPE_CHECKING:
    from gateway.request.response_stream import Answer


class Nobody(Client):
    """Reads an answer that nobody waits for at the moment, so that its end is noticed."""

    def __init__(self, answer: Answer, now_s: Callable[[], float]) -> None:
        super().__init__(limit_bytes=2**62)
        self._answer = answer
        self._now_s = now_s

    def wake(self, _stream: OpenStream) -> None:
        answer = self._answer
        if answer.was_let_go:
            return
        answer.take(self._now_s())
        if answer.ended:
            answer.finish_unseen()

    def drop(self, reason: str) -> None:
        """There is nobody to part with."""


class _Inert(Client):
    """For streams that have ended."""

    def wake(self, stream: OpenStream) -> None:
        """Nothing is taken."""

    def drop(self, reason: str) -> None:
        """There is nobody to part with."""


INERT = _Inert(limit_bytes=0)
