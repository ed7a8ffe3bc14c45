"""Messages that wait a moment for others, with which they are sent and acknowledged in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nats.aio.msg import Msg

from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import Connection, status_of
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import MillraceError

_ANSWERS_TIMEOUT_S: Final = 1.0


@dataclass(slots=True)
class _Message:
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    answer: asyncio.Future[Msg | None]
    reply: str = ""


class PublishBatcher:
    """Stores messages in groups. A process that sleeps between messages pays for waking up and for
    reading and writing its socket each time, which is most of what storing one costs; a group pays
    once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: list[_Message] = []
        self._tasks = Tasks()

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str], linger_s: float
    ) -> None:
        """As ``jetstream.store``, after ``linger_s`` at most: the first one of a group says how
        long it waits for others."""
        loop = asyncio.get_running_loop()
        message = _Message(subject, payload, headers, loop.create_future())
        self._waiting.append(message)
        if len(self._waiting) == 1:
            loop.call_later(linger_s, self._leave)
        answer = await message.answer
        if answer is None or status_of(answer) is not None:
            # Lost on the way, late, or nobody was there to store it: now by itself, for as long as
            # that takes.
            await jetstream.store(self._connection, subject, payload, headers)
        else:
            jetstream.stored_at(answer)

    def _leave(self) -> None:
        group = [message for message in self._waiting if not message.answer.done()]
        self._waiting.clear()
        self._tasks.spawn(self._send(group), "store a batch")

    async def _send(self, group: Sequence[_Message]) -> None:
        try:
            for message in group:
                await self._send_one(message)
            if group:
                answers = [message.answer for message in group]
                await asyncio.wait(answers, timeout=_ANSWERS_TIMEOUT_S)
        finally:
            # Whatever went wrong, nobody waits for ever.
            for message in group:
                self._connection.forget(message.reply)
                _settle(message.answer, None)

    async def _send_one(self, message: _Message) -> None:
        on_answer = partial(_settle, message.answer)
        try:
            message.reply = await self._connection.ask(
                message.subject, message.payload, on_answer, message.headers
            )
        except MillraceError as error:
            if not message.answer.done():
                message.answer.set_exception(error)


def _settle(future: asyncio.Future[Msg | None], answer: Msg | None) -> None:
    if not future.done():
        future.set_result(answer)
