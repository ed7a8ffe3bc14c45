"""The gateway without its sockets: a request's life from a well-formed ask to its record."""

from __future__ import annotations

import asyncio
import random
import secrets

import msgspec

from bus.api import Bus
from bus.clock import Clock
from gateway.deliveries import Deliveries
from gateway.errors import DrainingError
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.models import Models, ServedModelLike
from gateway.parsing import Ask
from gateway.stream import Client, OpenStream, status_of
from gateway.streams import GenerationIndex, StreamTable
from registry.served import MAX_INLINE_CHARACTERS
from schemas.config import GatewayConfig
from schemas.errors import BusUnavailableError, ParameterError
from schemas.frames import Cancelled
from schemas.jobs import Job, Source
from schemas.records import DeliveryRecord

_TENANT = "local"
_NS_PER_S = 1_000_000_000
_DRAIN_POLL_S = 0.05
_LAST_RECORDS_S = 1.0


class Gateway:
    """Owns the streams, what is known of the fleet, and the records on their way out.

    ``start`` before the first request, ``close`` after the last; ``begin`` and the streams that
    it returns are all that the HTTP and WebSocket handlers need.
    """

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        models: Models,
        clock: Clock,
        seed_source: random.Random | None = None,
        generations: GenerationIndex | None = None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.models = models
        self.clock = clock
        self.gateway_id = config.gateway_id or f"gw-{secrets.token_hex(6)}"
        self.metrics = Metrics()
        self.fleet = Fleet(clock)
        self.streams = StreamTable(
            bus, config, self.gateway_id, self.fleet, clock, self._on_end, generations
        )
        self.deliveries = Deliveries(bus.outbox, clock)
        self.draining = False
        self._seed_source = seed_source or random.Random()
        self.metrics.watch(self.streams, self.fleet)

    async def start(self) -> None:
        self.deliveries.start()
        await self.fleet.start(self.bus)
        await self.streams.start()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and wait for the open streams, at most ``timeout_s``."""
        self.draining = True
        give_up_s = self.clock.monotonic() + timeout_s
        while self.streams.num_served and self.clock.monotonic() < give_up_s:
            await self.clock.sleep(_DRAIN_POLL_S)

    async def close(self) -> None:
        """End what is left and let go of the bus's subscriptions; the bus stays open."""
        self.streams.end_all(Cancelled())
        await self.streams.close()
        await self.fleet.close()
        await self.deliveries.close(_LAST_RECORDS_S)

    async def begin(self, ask: Ask, request_id: str, source: Source, client: Client) -> OpenStream:
        """Tokenise, knock at the queue's door and publish; the stream is accepted on return.

        Raises MillraceError: nothing was stored then, and nothing will come. A client that left
        in the meantime (``client_gone``) is for the caller to notice.
        """
        if self.draining:
            raise DrainingError("This gateway is shutting down. Send the request again.")
        received_ns = self.clock.now_ns()
        received_s = self.clock.monotonic()
        model = await self.models.get(ask.model)
        job = Job(
            request_id=request_id,
            model=ask.model,
            prompt=ask.prompt,
            messages=ask.messages,
            prompt_token_ids=ask.prompt_token_ids,
            sampling=ask.sampling,
            reply=self.gateway_id,
            batch_frames=True,
            tenant=_TENANT,
            user=ask.user,
            session_id=ask.session_id,
            tier=ask.tier,
            source=source,
            model_requested=ask.model,
            received_ns=received_ns,
            deadline_ns=received_ns + round(self.config.request_timeout_s * _NS_PER_S),
        )
        job = await self._prepare(model, job, ask.num_prompt_characters)
        self.fleet.check_door(job.model)
        if not self.bus.connected:
            raise BusUnavailableError("The message bus is away. Try again in a moment.")
        # Once published, text is of no use here any more: ids say it all.
        stream = self.streams.open(
            msgspec.structs.replace(job, prompt_token_ids=()), client, received_s
        )
        try:
            await self.bus.jobs.publish(job)
        except BaseException:
            self.streams.discard(stream)
            raise
        self.streams.accept(stream)
        return stream

    async def _prepare(self, model: ServedModelLike, job: Job, num_characters: int) -> Job:
        try:
            if num_characters > MAX_INLINE_CHARACTERS:
                return await asyncio.to_thread(model.prepare, job, self._seed_source)
            return model.prepare(job, self._seed_source)
        except ParameterError as error:
            if error.param != "prompt_token_ids":
                raise
            # Token ids come in the field that also takes text.
            raise ParameterError("prompt", error.message) from error

    def _on_end(self, stream: OpenStream) -> None:
        now_s = self.clock.monotonic()
        first_s = stream.first_text_s
        self.metrics.count_end(stream, now_s)
        self.deliveries.put(
            DeliveryRecord(
                request_id=stream.request_id,
                gateway_id=self.gateway_id,
                tenant=stream.job.tenant,
                source=stream.job.source,
                first_byte_ms=0.0 if first_s is None else (first_s - stream.opened_s) * 1e3,
                total_ms=(now_s - stream.opened_s) * 1e3,
                tokens_delivered=stream.num_delivered,
                num_replays=stream.num_replays,
                num_epochs=stream.reader.num_epochs,
                outcome=stream.outcome or status_of(stream).value,
                done_ns=self.clock.now_ns(),
            )
        )
