"""Streams that move between workers, with blocks of the KV cache."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from millrace.schemas.control import Prefilled, Pulled, SetRole, Warm, WorkerReply
from millrace.schemas.engines import EngineKind, WorkerRole
from millrace.schemas.errors import MillraceError
from millrace.workers.host.capacity import OK, rejected
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.departures import Departures
from millrace.workers.host.engine_intake import cache_salt_of, warming_request
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.generations.state import GenerationPhase

# Weight of the earlier pulls when the next one is counted (a decaying average).
_KEPT_SHARE = 0.8

logger = logging.getLogger(__name__)


class StreamMoves:
    """Tracker of streams that leave this worker or arrive from another.

    It knows which streams have left and may still pull their blocks from here. It tells the workers
    that streams came from when the streams need nothing more. A worker of the role ``prefill``
    tells the schedulers which of its streams may continue elsewhere. Each notice is sent once and
    may be lost. ``role`` is the configured one until another is set.

    ``on_pulled`` is called when a stream has its pulled blocks, or has had them prefetched: there
    is time for the next pull.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.role = context.config.role
        self.on_pulled: Callable[[], None] = lambda: None
        self._departures = Departures(context.clock)
        self._pulled: defaultdict[str, list[str]] = defaultdict(list)
        self._prefilled: list[str] = []
        self._warming: dict[str, asyncio.Future[bool]] = {}
        self._has_pending = asyncio.Event()
        self._recent_tokens = self._recent_s = 0.0

    @property
    def pull_tokens_per_s(self) -> float:
        """Recent rate of pulls in tokens per second, waiting time included; 0 before the first
        pull.
        """
        return self._recent_tokens / self._recent_s if self._recent_s else 0.0

    # --- leaving streams ---

    def left(self, generation: Generation) -> None:
        """Record that another worker continues a request that ran here."""
        has_blocks = generation.phase in (GenerationPhase.PREFILLING, GenerationPhase.DECODING)
        if not has_blocks or self._context.engine.transfer_endpoint is None:
            return
        self._departures.add(generation.request_id)

    def note_pulled(self, pulled: Pulled) -> None:
        """Forget streams whose new workers have pulled their blocks."""
        self._departures.discard(pulled.request_ids)

    @property
    def num_kept(self) -> int:
        """Number of streams that have left lately and may still pull."""
        return len(self._departures)

    # --- arriving and prefilled streams ---

    def advanced(self, generation: Generation, *, began: bool) -> None:
        """Record that the engine has begun a request, or has made its first token."""
        source = generation.kv_source
        if source is not None and began:
            self._note_pull(generation)
            self.on_pulled()
            self._pulled[source.worker_id].append(generation.request_id)
            self._has_pending.set()
        if self.role is WorkerRole.PREFILL:
            self._note_prefilled(generation)

    def _note_prefilled(self, generation: Generation) -> None:
        if generation.phase is GenerationPhase.DECODING and generation.output.beams is None:
            self._prefilled.append(generation.request_id)
            self._has_pending.set()

    # --- roles ---

    def set_role(self, command: SetRole) -> WorkerReply:
        """Change the role; reject the command if the engine has no roles."""
        kind = self._context.config.engine.kind
        if kind is not EngineKind.REAL:
            return rejected(
                "no_roles", f"roles are for Millrace's own engine, and {kind} runs here"
            )
        if command.from_role not in (None, self.role):
            return rejected("stale_role", f"the role is {self.role} here")
        if self.role is not command.role:
            logger.info("the role changes", extra={"role": command.role, "before": self.role})
            self.role = command.role
        return OK

    def hand_on(self, generations: Iterable[Generation]) -> None:
        """Offer the running streams to other workers, if this worker's role is now ``prefill``."""
        if self.role is WorkerRole.PREFILL:
            for generation in generations:
                self._note_prefilled(generation)

    def _note_pull(self, generation: Generation) -> None:
        timing = generation.timing
        if generation.accounting.num_pulled_tokens:
            waited_s = (timing.started_ns - timing.accepted_ns) / 1e9
            self._recent_tokens = (
                _KEPT_SHARE * self._recent_tokens + generation.accounting.num_pulled_tokens
            )
            self._recent_s = _KEPT_SHARE * self._recent_s + max(waited_s, 0.0)

    # --- prefetch pulls ---

    async def warm(self, warm: Warm) -> WorkerReply:
        """Have the engine pull the blocks of a stream that runs elsewhere; return when the pull is
        over.
        """
        engine = self._context.engine
        if engine.transfer_endpoint is None or engine.is_down:
            return rejected("bad_request", "this worker cannot pull KV blocks now")
        engine_id = f"{warm.job.request_id}/warm"
        if engine_id in self._warming:
            return rejected("bad_request", "these KV blocks are being pulled already")
        done = self._warming[engine_id] = asyncio.get_running_loop().create_future()
        salt = cache_salt_of(warm.job, self._context.config.prefix_scope)
        engine.add(warming_request(engine_id, warm, salt))
        if not await done:
            return rejected("bad_request", "the engine is gone")
        self.on_pulled()
        return OK

    def note_warmed(self, engine_id: str, *, is_lost: bool = False) -> bool:
        """End the prefetch pull ``engine_id`` if there is one, and return whether there was one."""
        done = self._warming.pop(engine_id, None)
        if done is not None and not done.done():
            done.set_result(not is_lost)
        return done is not None

    def on_engine_lost(self) -> None:
        """Fail all prefetch pulls: their blocks are gone with the engine."""
        for engine_id in list(self._warming):
            self.note_warmed(engine_id, is_lost=True)

    async def run(self) -> None:
        """Publish notices until cancelled."""
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            try:
                await self._publish()
            except MillraceError as error:
                logger.warning("notices of moves could not be sent", extra={"code": error.code})

    async def _publish(self) -> None:
        control, worker_id = self._context.bus.control, self._context.worker_id
        prefilled, self._prefilled = self._prefilled, []
        pulled, self._pulled = self._pulled, defaultdict(list)
        if prefilled:
            await control.publish_prefilled(
                Prefilled(worker_id=worker_id, request_ids=tuple(prefilled))
            )
        for source_id, request_ids in pulled.items():
            if request_ids:
                await control.publish_pulled(
                    Pulled(worker_id=source_id, request_ids=tuple(request_ids))
                )
