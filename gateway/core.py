"""Gateway without its sockets: its parts, from start to end."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from millrace.bus.api import Bus
from millrace.bus.fleet.directories import Directories
from millrace.bus.storage import NATS, REDIS
from millrace.bus.store.watch import StoreMetrics, StoreWatch
from millrace.bus.transport import Subscription
from millrace.gateway.alerts import GatewayAlerts
from millrace.gateway.metrics import Metrics
from millrace.gateway.models import LoadedModels
from millrace.gateway.request.admission import Admission
from millrace.gateway.request.failure_log import FailureLog
from millrace.gateway.request.index import RequestIndex
from millrace.gateway.request.job_maker import JobMaker
from millrace.gateway.request.job_runner import GatewayJobRunner
from millrace.gateway.request.model_choice import ModelChoice
from millrace.gateway.request.refusals import RefusalRecords
from millrace.gateway.request.response_stream import OpenResponses, ResponseContext, ResponseStream
from millrace.gateway.request.resuming import Resuming
from millrace.gateway.request.submitter import RequestSubmitter
from millrace.gateway.request.tool_loop import run_tools
from millrace.gateway.request.tracing import RequestTraces
from millrace.gateway.sessions.sessions import Sessions
from millrace.gateway.streams.deliveries import Deliveries, DeliveryHistory, delivery_record
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.replays import RunningRequestReader
from millrace.gateway.streams.stream import OpenStream
from millrace.gateway.streams.streams import StreamTable
from millrace.gateway.tenancy.identity import AuthenticationError, Caller, Identity, revoked_key
from millrace.gateway.tenancy.key_watch import KeyWatch
from millrace.gateway.tenancy.limits import Limiter
from millrace.gateway.tools.catalogue import ToolCatalogue
from millrace.gateway.tools.runner import ToolRunner
from millrace.gateway.transport.connection_writer import WriteCoalescer
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.tracing import Tracing
from millrace.schemas.config import Config
from millrace.schemas.frames import Failed

_DRAIN_POLL_S = 0.05
_LAST_RECORDS_S = 1.0
_LAST_SETTLEMENTS_S = 1.0


def new_gateway_id() -> str:
    """Return an id for a gateway that was configured without one."""
    return f"gw-{secrets.token_hex(6)}"


class Socket(Protocol):
    """WebSocket of a client. ``caller`` is None until the client has authenticated."""

    caller: Caller | None

    def announce_going_away(self) -> None:
        """Announce the shutdown of this gateway: the socket ends with its last generation."""

    def expel(self, why: AuthenticationError) -> None:
        """Tell the client that its key was revoked, and close the socket."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Servers behind a gateway. Without ``redis`` there are no keys, sessions, idempotency keys or
    batches, and a response cannot move to another gateway. ``generations`` knows the worker of each
    request.
    """

    bus: Bus
    redis: RedisLink | None = None
    generations: RunningRequestReader | None = None


class Gateway:
    """Owner of the endpoints' shared state: streams, responses, limits, sessions, tools, the view
    of the fleet.

    Call ``start`` before the first request, ``close`` after the last. ``sockets`` has the open
    WebSockets. ``has_new_batch`` wakes the runner of batches.
    """

    def __init__(
        self,
        backends: Backends,
        config: Config,
        models: LoadedModels,
        clock: Clock,
        seed_source: random.Random | None = None,
        tools: ToolCatalogue | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        bus, redis = backends.bus, backends.redis
        settings = config.gateway
        self.bus = bus
        self.config = settings
        self.models = models
        self._directories = Directories.of(redis, clock)
        self.adapters, self.rollouts = self._directories.adapters, self._directories.rollouts
        models.follow(self._directories)
        self.clock = clock
        self.redis = redis
        self.generations = backends.generations
        self.gateway_id = settings.gateway_id
        self.exposure = config.metrics
        self.slo = config.slo
        self.traces = None if tracing is None else RequestTraces(tracing, clock, settings)
        self.sockets: set[Socket] = set()
        self.has_new_batch = asyncio.Event()
        self.write_coalescer = WriteCoalescer()
        self.metrics = Metrics()
        self.fleet = FleetView(clock)
        self.stores = StoreWatch(config.storage, clock, bus.storage, redis, gates=True)
        self.alerts = GatewayAlerts(self.fleet, self.stores, clock)
        self.streams = StreamTable(
            bus, settings, self.gateway_id, self.fleet, clock, self._on_end, backends.generations
        )
        self.deliveries = Deliveries(bus.outbox, clock)
        self.failure_log = FailureLog(clock)
        self.refusals = RefusalRecords(
            bus.outbox, clock, self.gateway_id, self.metrics, self.failure_log
        )
        self.identity = Identity(redis, settings, clock)
        self.limiter = Limiter(redis, settings, clock)
        self.tools = ToolRunner(tools or ToolCatalogue(), settings, clock)
        self.prompts = PromptPool()
        self.admission = Admission(
            bus,
            self.fleet,
            self.stores,
            self.limiter,
            self.prompts,
            settings.request_timeout_s,
        )
        self.maker = JobMaker(
            self.tools.catalogue,
            seed_source or random.Random(),
            self.prompts,
            trusts_templates=settings.trust_request_chat_template,
        )
        self.sessions = Sessions(
            redis,
            settings,
            clock,
            models,
            lambda *asked: self.runner.generate(*asked),
            self.tools.catalogue.definitions,
            self.prompts,
        )
        self.choice = ModelChoice(models, self.fleet, self.sessions)
        self.responses = OpenResponses()
        context = ResponseContext(
            bus=bus,
            config=settings,
            clock=clock,
            metrics=self.metrics,
            failure_log=self.failure_log,
            models=models,
            identity=self.identity,
            index=RequestIndex(redis, settings.idempotency_ttl_s),
            sessions=self.sessions,
            choice=self.choice,
            maker=self.maker,
            admission=self.admission,
            streams=self.streams,
            responses=self.responses,
            history=DeliveryHistory(clock, settings.request_timeout_s),
            tools=self.tools,
            run_tools=run_tools,
        )
        self.runner = GatewayJobRunner(context)
        self.resuming = Resuming(context)
        self.submitter = RequestSubmitter(context, self.resuming)
        self.keys = KeyWatch(redis, clock, self._keys_in_use, self._on_closed_keys)
        self._handovers: Subscription | None = None
        self._watch()

    def _watch(self) -> None:
        """Register the gauges for Prometheus."""
        self.metrics.watch(self.streams, self.fleet, self.limiter, self.deliveries)
        self.metrics.know_models(self.models.names())
        self.metrics.registry.register(
            StoreMetrics((NATS, REDIS), self.stores.troubles, lambda: self.stores.free)
        )
        self.metrics.watch_sizes(
            {
                "millrace_open_sockets": ("Open WebSockets", lambda: len(self.sockets)),
                "millrace_kept_answers": (
                    "Ended responses that no client has read yet",
                    lambda: len(self.responses.all()),
                ),
                "millrace_tasks": (
                    "Tasks of the event loop",
                    lambda: len(asyncio.all_tasks()),
                ),
                "millrace_unsent_refusals": (
                    "Kinds of refusals waiting to be recorded",
                    lambda: self.refusals.num_waiting,
                ),
                "millrace_unsettled_reservations": (
                    "Reservations waiting for Redis to be settled",
                    lambda: self.limiter.settlements.num_waiting,
                ),
            }
        )

    @property
    def draining(self) -> bool:
        return self.admission.draining

    async def start(self) -> None:
        self.deliveries.start()
        self.keys.start()
        await self._directories.start()
        self.refusals.start()
        self.failure_log.start()
        await self.stores.look()
        self.stores.start()
        await self.fleet.start(self.bus)
        self.alerts.start()
        await self.streams.start()
        self._handovers = await self.bus.control.serve_handovers(
            self.gateway_id, self.resuming.hand_over
        )

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the open streams, at most ``timeout_s``; then disconnect
        the remaining clients, which resume at another gateway.
        """
        self.admission.draining = True
        for socket in list(self.sockets):
            socket.announce_going_away()
        give_up_s = self.clock.monotonic() + timeout_s
        while self._serves() and self.clock.monotonic() < give_up_s:
            await self.clock.sleep(_DRAIN_POLL_S)
        clients = {stream.client for stream in self.streams}
        for client in clients.union(*(response.clients for response in self.responses.all())):
            client.go_away()

    def _serves(self) -> bool:
        """Return whether a client waits for a stream, or for a tool between two streams."""
        return bool(self.streams.num_served) or any(
            response.is_attached for response in self.responses.all()
        )

    async def close(self) -> None:
        """Release the remaining answers, which other gateways may resume, and the bus's
        subscriptions. The bus stays open.
        """
        await self.keys.close()
        await self._directories.close()
        await self.alerts.close()
        await self.stores.close()
        for response in self.responses.all():
            response.hand_off()
        if self._handovers is not None:
            await self._handovers.close()
        await self.responses.tasks.close()
        await self.sessions.close()
        await self.tools.close()
        await self.streams.close()
        await self.fleet.close()
        self.prompts.close()
        await asyncio.gather(
            self.deliveries.close(_LAST_RECORDS_S),
            self.identity.close(),
            self.refusals.close(_LAST_RECORDS_S),
            self.failure_log.close(),
            self.limiter.close(_LAST_SETTLEMENTS_S),
        )

    def _keys_in_use(self) -> Iterator[str]:
        for socket in self.sockets:
            if socket.caller is not None:
                yield socket.caller.key_id
        for response in self.responses.all():
            yield response.caller.key_id

    def _on_closed_keys(self, key_ids: Set[str]) -> None:
        """Disconnect the sockets of revoked keys, and end their responses."""
        for key_id in key_ids:
            self.identity.forget(key_id)
        for response in self.responses.all():
            if response.caller.key_id in key_ids:
                why = revoked_key(response.caller.key_id)
                response.break_off(Failed(code=why.code, message=why.message))
        for socket in list(self.sockets):
            if socket.caller is not None and socket.caller.key_id in key_ids:
                socket.expel(revoked_key(socket.caller.key_id))

    def _on_end(self, stream: OpenStream) -> None:
        if isinstance(stream.owner, ResponseStream):
            stream.owner.note_end(stream)
        if not stream.was_counted:
            self.metrics.count_end(stream, self.clock.monotonic())
        elif stream.delivery.num_resumes:
            self.metrics.count_return(stream.job.model)
        else:
            return  # a client that had the end reads the answer again
        self.deliveries.put(delivery_record(stream, self.gateway_id, self.clock))
