"""The gateway without its sockets: its parts, from start to end."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator, Set
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bus.api import Bus, Subscription
from bus.storage import NATS, REDIS
from bus.store.watch import StoreMetrics, StoreWatch
from gateway.errors import DrainingError
from gateway.metrics import Metrics
from gateway.request.entries import Entries
from gateway.request.idempotency import Idempotency
from gateway.request.index import RequestIndex
from gateway.request.internal_generation import generate_quietly
from gateway.request.model_choice import ModelChoice
from gateway.request.models import Models
from gateway.request.refusals import Refusals
from gateway.request.response_stream import Answer
from gateway.request.resuming import Resuming
from gateway.request.submitter import Asker
from gateway.request.tracing import RequestTraces
from gateway.sessions.sessions import Sessions
from gateway.streams.deliveries import Deliveries
from gateway.streams.delivery_statistics import delivery_record
from gateway.streams.fleet import Fleet
from gateway.streams.replays import GenerationIndex
from gateway.streams.stream import Client, OpenStream
from gateway.streams.streams import StreamTable
from gateway.tenancy.identity import Identity, revoked_key
from gateway.tenancy.key_watch import KeyWatch
from gateway.tenancy.limits import Limiter
from gateway.tools.catalogue import ToolCatalogue
from gateway.tools.runner import ToolRunner
from gateway.transport.connection_writer import Pulse
from registry.tokenizers.prompt_pool import PromptPool, num_characters
from runtime.clock import Clock
from runtime.redis_link import RedisLink
from runtime.tracing import Tracing
from schemas.config import GatewayConfig, MetricsConfig, StorageConfig
from schemas.errors import BusUnavailableError, MillraceError
from schemas.frames import Failed
from schemas.jobs import Job

if TYPE_CHECKING:
    from gateway.api.socket_session import SocketSession

_DRAIN_POLL_S = 0.05
_LAST_RECORDS_S = 1.0
_LAST_SETTLEMENTS_S = 1.0


def new_gateway_id() -> str:
    """For a gateway that was given none."""
    return f"gw-{secrets.token_hex(6)}"


class Gateway:
    """Owns what the endpoints share: streams, answers, limits, sessions, tools, the fleet's state.

    ``start`` before the first request, ``close`` after the last. Without ``redis`` there are no
    keys, sessions, idempotency keys or batches, and an answer cannot move to another gateway. Those
    whose client has a socket are in ``sockets``.
    """

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        models: Models,
        clock: Clock,
        seed_source: random.Random | None = None,
        generations: GenerationIndex | None = None,
        redis: RedisLink | None = None,
        tools: ToolCatalogue | None = None,
        tracing: Tracing | None = None,
        storage: StorageConfig | None = None,
        exposure: MetricsConfig | None = None,
    ) -> None:
        self.bus = bus
        self.config = config
        self.models = models
        self.clock = clock
        self.redis = redis
        self.gateway_id = config.gateway_id or new_gateway_id()
        self.traces = None if tracing is None else RequestTraces(tracing, clock, config)
        self.sockets: set[SocketSession] = set()
        self.pulse = Pulse()
        self.metrics = Metrics()
        self.exposure = exposure or MetricsConfig()
        self.fleet = Fleet(clock)
        self.stores = StoreWatch(storage or StorageConfig(), clock, bus.storage, redis, gates=True)
        self.streams = StreamTable(
            bus, config, self.gateway_id, self.fleet, clock, self._on_end, generations
        )
        self.deliveries = Deliveries(bus.outbox, clock)
        self.refusals = Refusals(bus.outbox, clock, self.gateway_id, self.metrics)
        self.seed_source = seed_source or random.Random()
        self.identity = Identity(redis, config, clock)
        self.limiter = Limiter(redis, config, clock)
        self.tools = ToolRunner(tools or ToolCatalogue(), config, clock)
        self.prompts = PromptPool()
        self.entries = Entries(self.limiter, self.prompts)
        self.sessions = Sessions(
            redis,
            config,
            clock,
            models,
            self.generate_quietly,
            self.tools.definitions,
            self.prompts,
        )
        self.choice = ModelChoice(models, self.fleet, self.sessions)
        index = RequestIndex(redis, config.idempotency_ttl_s)
        self.asker = Asker(
            bus,
            config,
            self.gateway_id,
            models,
            self.choice,
            self.streams,
            self.fleet,
            clock,
            index,
            self.limiter,
            self.sessions,
            self.tools,
            self.metrics.gaps,
            self.seed_source,
            self.identity.keeps_transcripts,
            self.stores.check,
            self.prompts,
            self.entries,
        )
        self.resuming = Resuming(
            bus,
            self.gateway_id,
            index,
            self.asker,
            self.streams,
            models,
            clock,
            self.identity.check_key,
        )
        self.idempotency = Idempotency(index, self.asker, self.resuming, clock)
        self.keys = KeyWatch(redis, clock, self._keys_in_use, self._on_closed_keys)
        self._handovers: Subscription | None = None
        self.metrics.watch(self.streams, self.fleet)
        self.metrics.watch_limits(self.limiter)
        self.metrics.watch_deliveries(self.deliveries)
        self.metrics.registry.register(
            StoreMetrics((NATS, REDIS), self.stores.troubles, lambda: self.stores.free)
        )
        self.metrics.watch_sizes(
            {
                "millrace_open_sockets": ("WebSockets that are open", lambda: len(self.sockets)),
                "millrace_kept_answers": (
                    "Answers whose end nobody has taken",
                    lambda: len(self.asker.answers()),
                ),
                "millrace_tasks": (
                    "Tasks of the event loop",
                    lambda: len(asyncio.all_tasks()),
                ),
                "millrace_unsent_refusals": (
                    "Kinds of refusals that wait to be recorded",
                    lambda: self.refusals.num_waiting,
                ),
                "millrace_unsettled_reservations": (
                    "Reservations that wait for Redis to be settled",
                    lambda: self.limiter.num_unsettled,
                ),
            }
        )

    @property
    def draining(self) -> bool:
        return self.asker.draining

    async def start(self) -> None:
        self.deliveries.start()
        self.keys.start()
        self.refusals.start()
        await self.stores.look()
        self.stores.start()
        await self.fleet.start(self.bus)
        await self.streams.start()
        self._handovers = await self.bus.control.serve_handovers(
            self.gateway_id, self.resuming.hand_over
        )

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and wait for the open streams, at most ``timeout_s``; then part with the
        clients that are left, who go on elsewhere."""
        self.asker.draining = True
        for socket in list(self.sockets):
            socket.announce_going_away()
        give_up_s = self.clock.monotonic() + timeout_s
        while self._serves() and self.clock.monotonic() < give_up_s:
            await self.clock.sleep(_DRAIN_POLL_S)
        clients = {stream.client for stream in self.streams}
        for client in clients.union(*(answer.clients for answer in self.asker.answers())):
            client.go_away()

    def _serves(self) -> bool:
        """Whether somebody waits for a stream, or for a tool between two of them."""
        return bool(self.streams.num_served) or any(
            answer.is_served for answer in self.asker.answers()
        )

    async def close(self) -> None:
        """Let go of the answers that are left, which others may go on with, and of the bus's
        subscriptions; the bus stays open."""
        await self.keys.close()
        await self.stores.close()
        for answer in self.asker.answers():
            answer.let_go()
        if self._handovers is not None:
            await self._handovers.close()
        await self.asker.close()
        await self.sessions.close()
        await self.tools.close()
        await self.streams.close()
        await self.fleet.close()
        self.prompts.close()
        await asyncio.gather(
            self.deliveries.close(_LAST_RECORDS_S),
            self.refusals.close(_LAST_RECORDS_S),
            self.limiter.close(_LAST_SETTLEMENTS_S),
        )

    async def begin_job(self, job: Job, client: Client) -> OpenStream:
        """Publish a job that is ready for a worker and whose frames come here; the stream is
        accepted on return. Raises MillraceError: nothing was stored then."""
        if self.draining:
            raise DrainingError("This gateway is shutting down. Send the request again.")
        self.stores.check()
        self.fleet.check_door(job.model)
        if not self.bus.connected:
            raise BusUnavailableError("The message bus is away. Try again in a moment.")
        stripped = replace(job, prompt_token_ids=())
        stream = self.streams.open(stripped, client, self.clock.monotonic())
        try:
            published = await self.bus.jobs.publish(job, reserved=True)
        except BaseException:
            self.streams.discard(stream)
            raise
        self.streams.accept(stream, published.stream_sequence)
        return stream

    async def generate_quietly(self, job: Job) -> str:
        """The text of a job that no client waits for. Raises MillraceError if there is none."""
        model = await self.models.get(job.model)
        addressed = replace(job, reply=self.gateway_id, batch_frames=True)
        prepare = partial(model.prepare, addressed, self.seed_source)
        ready = await self.prompts.run(job.tenant, num_characters(job), prepare)
        return await generate_quietly(self, ready)

    def _keys_in_use(self) -> Iterator[str]:
        for socket in self.sockets:
            if socket.caller is not None:
                yield socket.caller.key_id
        for answer in self.asker.answers():
            yield answer.caller.key_id

    def _on_closed_keys(self, key_ids: Set[str]) -> None:
        """Whoever came with one of these is parted with, and what is made for it ends."""
        for key_id in key_ids:
            self.identity.forget(key_id)
        for answer in self.asker.answers():
            if answer.caller.key_id in key_ids:
                answer.break_off(_failed(revoked_key(answer.caller.key_id)))
        for socket in list(self.sockets):
            if socket.caller is not None and socket.caller.key_id in key_ids:
                socket.expel(revoked_key(socket.caller.key_id))

    def _on_end(self, stream: OpenStream) -> None:
        if isinstance(stream.owner, Answer):
            stream.owner.note_end(stream)
        self.metrics.count_end(stream, self.clock.monotonic())
        self.deliveries.put(delivery_record(stream, self.gateway_id, self.clock))


def _failed(error: MillraceError) -> Failed:
    return Failed(code=error.code, message=error.message)
