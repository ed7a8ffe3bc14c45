"""A gateway without HTTP: the real table of streams, and ``gateway.request.resuming`` on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.bus.api import Bus
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.replays import RunningRequestReader
from millrace.gateway.streams.stream import Client, OpenStream, TokenGaps
from millrace.gateway.streams.streams import StreamTable
from millrace.runtime.clock import Clock
from millrace.schemas.config import GatewayConfig
from millrace.schemas.control import Cancel, HandedOver
from millrace.schemas.errors import MillraceError
from tests.protocol.clients import Asked, Reader
from tests.protocol.processes import Process

_HANDOVER_TIMEOUT_S = 0.5
_GRACE_S = 20.0
_REQUEST_TIMEOUT_S = 200.0
_NEVER_S = 1e9


class Gateway:
    """Incarnation of a gateway. ``gateway_id`` is the same for all incarnations."""

    def __init__(
        self,
        gateway_id: str,
        process: Process,
        bus: Bus,
        clock: Clock,
        generations: RunningRequestReader,
    ) -> None:
        self.gateway_id = gateway_id
        self.process = process
        self._bus = bus
        self._clock = clock
        self._fleet = FleetView(clock)
        config = GatewayConfig(gateway_id=gateway_id, request_timeout_s=_REQUEST_TIMEOUT_S)
        self.table = StreamTable(bus, config, gateway_id, self._fleet, clock, _ignore, generations)
        self._readers: dict[str, Reader] = {}

    async def run(self) -> None:
        """Serve until it is killed."""
        await self._insist_on_fleet()
        await self.table.start()
        await self._bus.control.serve_handovers(self.gateway_id, self._hand_over)
        await self._clock.sleep(_NEVER_S)

    async def _insist_on_fleet(self) -> None:
        while True:
            try:
                await self._fleet.start(self._bus)
            except MillraceError:
                await self._clock.sleep(0.25)  # as the supervisor starts it again
            else:
                return

    # --- what a Reader needs ---

    def soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(self.process.do, callback)

    def now_s(self) -> float:
        return self._clock.monotonic()

    def finished(self, stream: OpenStream) -> None:
        if self.table.get(stream.request_id) is stream:
            self._readers.pop(stream.request_id, None)
            self.table.finish(stream)

    # --- requests ---

    async def ask(self, asked: Asked) -> None:
        """Publish it. Raises MillraceError: it was perhaps not stored."""
        job = asked.question.job
        reader = self._reader(asked)
        stream = self.table.open(job, reader, self._clock.monotonic())
        try:
            published = await self._bus.jobs.publish(job, reserved=True)
        except BaseException:
            self.table.discard(stream)
            raise
        self.table.accept(stream, published.stream_sequence)

    async def resume(self, asked: Asked) -> None:
        """Resume a request of another connection from its first missing token.

        Do nothing if the client's connection is gone before a frame could be sent to it.
        """
        is_dead = False
        connection = asked.num_moves
        if asked.holder != self.gateway_id:
            is_dead = await self._take_from(asked) is None
        if asked.num_moves != connection:
            return
        if (former := self.table.get(asked.request_id)) is not None:
            self._let_go(former)
        reader = self._reader(asked)
        stream = self.table.take_over(asked.question.job, reader, None, len(asked.token_ids))
        is_foreign = asked.origin != self.gateway_id
        try:
            if is_foreign:
                origin_is_dead = is_dead and asked.origin == asked.holder
                await self.table.subscribe_as_proxy_for(asked.origin, is_dead=origin_is_dead)
                is_foreign = not origin_is_dead
        finally:
            self.table.follow(stream, is_foreign=is_foreign)
        asked.holder = self.gateway_id

    async def _take_from(self, asked: Asked) -> HandedOver | None:
        try:
            return await self._bus.control.hand_over(
                asked.holder, asked.request_id, _HANDOVER_TIMEOUT_S
            )
        except (MillraceError, TimeoutError):
            return None

    async def publish(self, asked: Asked) -> None:
        """Publish a job without a listener. Raises MillraceError: it may have been stored."""
        await self._bus.jobs.publish(asked.question.job)

    def cancel(self, request_id: str) -> None:
        """Cancel a request as its owner does."""
        self.process.spawn(self._bus.control.cancel(Cancel(request_id=request_id)))

    def disconnect(self, asked: Asked) -> None:
        """Close the client's connection; the client may return for a while."""
        stream = self.table.get(asked.request_id)
        self._close(asked.request_id)
        if stream is not None:
            stream.change_client(_Nobody(self))
            stream.detach(self._clock.monotonic() + _GRACE_S)

    def leave(self, asked: Asked) -> None:
        """The client does not want it any more."""
        stream = self.table.get(asked.request_id)
        self._close(asked.request_id)
        if stream is not None:
            self.table.abort(stream, "disconnect")

    def _reader(self, asked: Asked) -> Reader:
        reader = self._readers[asked.request_id] = Reader(self, asked)
        return reader

    def _hand_over(self, request_id: str) -> HandedOver:
        stream = self.table.get(request_id)
        if stream is None:
            return HandedOver()
        token_ids = tuple(stream.reader.token_ids)
        self._let_go(stream)
        return HandedOver(token_ids=token_ids)

    def _let_go(self, stream: OpenStream) -> None:
        self._close(stream.request_id)
        self.table.hand_off(stream)

    def _close(self, request_id: str) -> None:
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            reader.close()


class _Nobody(Client):
    """Stand-in for a client that may return."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(limit_bytes=1 << 30)
        self._gateway = gateway

    def wake(self, stream: OpenStream) -> None:
        self._gateway.soon(lambda: self._take(stream))

    def drop(self, reason: str) -> None:
        raise AssertionError(f"nobody was dropped: {reason}")

    def _take(self, stream: OpenStream) -> None:
        stream.read(self._gateway.now_s(), TokenGaps())
        if stream.ended:
            self._gateway.finished(stream)


def _ignore(_stream: OpenStream) -> None:
    """Do nothing: stream ends are not counted here."""
