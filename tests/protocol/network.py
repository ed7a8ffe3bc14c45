"""Core messages that come late, twice, in another order or not at all."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.bus import codec, subjects
from millrace.bus.memory.broker import MemoryBroker, Subscriber
from millrace.bus.transport import Message, OnMessage
from millrace.runtime.clock import Clock
from millrace.schemas.control import CancelReason
from millrace.schemas.errors import BusUnavailableError
from tests.protocol.processes import Process

_CANCELS = subjects.ALL_CANCELS.removesuffix("*")
_HOP_S = 0.000_2


@dataclass
class Weather:
    """Faults of the network for core messages.

    Each message takes up to ``delay_s``. ``share_twice`` and ``share_lost`` are the shares of
    messages that come twice or get lost. ``reorders``: messages of one sender may overtake one
    another too.
    """

    delay_s: float = 0.0
    share_twice: float = 0.0
    share_lost: float = 0.0
    reorders: bool = False


class FaultyTransport:
    """See ``bus.transport.Transport``: that of one process, in the weather that all share."""

    def __init__(
        self,
        broker: MemoryBroker,
        process: Process,
        clock: Clock,
        weather: Weather,
        draw: random.Random,
    ) -> None:
        self._broker = broker
        self._process = process
        self._clock = clock
        self._weather = weather
        self._draw = draw
        self._last_due_s = 0.0

    @property
    def max_payload_bytes(self) -> int:
        return self._broker.max_payload_bytes

    async def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._send(subject, payload, headers, "")

    async def _send(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> None:
        self._broker.require_fits(len(payload))
        kind = _kind(subject)
        await self._process.passes(kind, is_after=False)
        if not self._process.is_cut:
            weather, draw = self._weather, self._draw
            is_lost = draw.random() < weather.share_lost and _may_get_lost(subject, payload)
            is_twice = draw.random() < weather.share_twice
            for _ in range((not is_lost) + is_twice):
                self._post(subject, payload, headers, reply)
        await self._process.passes(kind, is_after=True)

    def _post(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> None:
        now_s = self._clock.monotonic()
        due_s = now_s + _HOP_S + self._draw.random() * self._weather.delay_s
        if not self._weather.reorders:
            due_s = self._last_due_s = max(due_s, self._last_due_s)
        asyncio.get_running_loop().call_later(
            due_s - now_s,
            self._arrive,
            subject,
            payload,
            headers,
            reply,
            context=contextvars.Context(),
        )

    def _arrive(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> None:
        is_heard = self._broker.publish(subject, payload, headers, reply)
        if reply and not is_heard and self._broker.up:
            self._broker.publish(reply, b"")  # the server reports no responder

    async def subscribe(self, subject: str, on_message: OnMessage, group: str = "") -> Subscriber:
        await self._process.running()

        def receive(message: Message) -> None:
            self._process.receive(lambda: on_message(message))

        return self._broker.subscribe(subject, receive, group)

    async def probe(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        num_starts = self._broker.num_starts
        answer = await self.request(subject, payload, timeout_s)
        if not self._broker.up or self._broker.num_starts != num_starts:
            raise BusUnavailableError("The message bus cannot be reached.")
        return answer

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Message | None:
        answers: list[Message] = []
        answered = asyncio.Event()

        def on_answer(message: Message) -> None:
            answers.append(message)
            answered.set()

        inbox = self._broker.new_inbox()
        subscriber = await self.subscribe(inbox, on_answer)
        try:
            await self._send(subject, payload, None, inbox)
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        except TimeoutError:
            return None
        finally:
            await subscriber.close()
        await self._process.running()
        return answers[0] if answers[0].payload else None


def _kind(subject: str) -> str:
    """Return the name by which traps know a subject: its first word, or the word after ``ctl``."""
    words = subject.split(".")
    return words[1] if words[0] == "ctl" else words[0]


def _may_get_lost(subject: str, payload: bytes) -> bool:
    """News that a request was taken away gets lost only together with a connection."""
    if not subject.startswith(_CANCELS) or not payload:
        return True
    return codec.CANCEL.decode(payload).reason is not CancelReason.SUPERSEDED
