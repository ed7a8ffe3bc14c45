"""One subscription for every answer that a connection waits for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

# Called with each answer, and with None when the connection is lost: no answer will come.
OnAnswer = Callable[[Msg | None], None]


class Inbox:
    """Hands answers to those who expect them; an answer that nobody expects any more is late."""

    def __init__(self) -> None:
        self._expected: dict[str, OnAnswer] = {}
        self._prefix = ""
        self._numbers = itertools.count()

    @property
    def prefix(self) -> str:
        return self._prefix

    def open(self, prefix: str) -> None:
        """Answers to ``<prefix>.*`` come to ``receive`` from now on."""
        self._prefix = prefix

    async def receive(self, message: Msg) -> None:
        on_answer = self._expected.get(message.subject)
        if on_answer is not None:
            on_answer(message)

    def expect(self, on_answer: OnAnswer) -> str:
        """A reply subject whose answers go to ``on_answer`` until it is forgotten."""
        subject = f"{self._prefix}.{next(self._numbers)}"
        self._expected[subject] = on_answer
        return subject

    def forget(self, subject: str) -> None:
        self._expected.pop(subject, None)

    def lose_all(self) -> None:
        """The connection is lost: whoever waits is told."""
        for on_answer in list(self._expected.values()):
            on_answer(None)
