"""Streams that leave a simulated worker for another or come from one, as ``workers.host.moves``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from millrace.schemas.control import Prefilled, Pulled, Warm, WorkerReply
from millrace.schemas.engines import WorkerRole
from millrace.schemas.transfer import TransferEndpoint
from millrace.simulation.workers.context import FleetContext
from millrace.simulation.workers.runs import SimulatedRun, prefix_of
from millrace.workers.host.departures import Departures
from millrace.workers.simulated.blocks import SimulatedBlocks

_LAYOUT = "simulated"


class SimulatedMoves:
    """Pulls the blocks of runs that say who has them, remembers which runs have left and may still
    pull theirs from here, and tells others: the worker that a run came from that it needs nothing
    more of it, and, in the role ``prefill``, the schedulers which runs may go on elsewhere.

    ``on_pulled`` is called when a run has what it came for, or has had it brought ahead of it."""

    def __init__(
        self, context: FleetContext, worker_id: str, role: WorkerRole, *, moves_blocks: bool
    ) -> None:
        self.role = role
        self._context = context
        self._worker_id = worker_id
        self._moves_blocks = moves_blocks
        self._departures = Departures(context.clock)
        self.on_pulled: Callable[[], None] = lambda: None

    @property
    def endpoint(self) -> TransferEndpoint | None:
        """Where others pull from; None where nothing moves."""
        if not self._moves_blocks:
            return None
        return TransferEndpoint(layout=_LAYOUT, token=self._worker_id, address=self._worker_id)

    @property
    def pull_tokens_per_s(self) -> float:
        """As ``WorkerStatus`` has it."""
        return self._context.network.tokens_per_s(self._worker_id)

    @property
    def outstanding_pull_tokens(self) -> int:
        """As ``WorkerStatus`` has it."""
        return self._context.network.coming_tokens(self._worker_id)

    def begin(self, blocks: SimulatedBlocks) -> None:
        """The worker is there, and has such a cache."""
        if self._moves_blocks:
            self._context.network.join(self._worker_id, blocks)

    def stop(self) -> None:
        """It is no more."""
        self._context.network.leave(self._worker_id)

    # --- what leaves ---

    def left(self, run: SimulatedRun) -> None:
        """Another worker goes on with what ran here."""
        if self._moves_blocks and run.started_ns:
            self._departures.add(run.request_id)

    def note_pulled(self, pulled: Pulled) -> None:
        """Whoever runs these has what it needs."""
        self._departures.discard(pulled.request_ids)

    @property
    def num_kept(self) -> int:
        """Runs that have left lately and may still pull."""
        return len(self._departures)

    # --- what comes, and what may go on ---

    def pull(self, run: SimulatedRun, on_done: Callable[[], None]) -> bool:
        """Whether a run waits for blocks; ``on_done`` is called when it does no longer."""
        source = run.dispatch.kv_source
        if source is None or run.sequence is None:
            return False
        return self._context.network.pull(self._worker_id, source, run.sequence, on_done)

    async def warm(self, warm: Warm, *, apart: bool) -> WorkerReply:
        """Pull what a run has where it is now; returns when that is over. ``apart``: tenants do not
        share what is cached of their prompts."""
        if not self._moves_blocks:
            return WorkerReply(ok=False, reason="bad_request", message="nothing is pulled here")
        over = asyncio.Event()
        sequence = prefix_of(warm.job, warm.token_ids, apart=apart)
        if self._context.network.pull(self._worker_id, warm.kv_source, sequence, over.set):
            await over.wait()
        self.on_pulled()
        return WorkerReply(ok=True)

    def advanced(self, started: Sequence[SimulatedRun], made_first: Sequence[SimulatedRun]) -> None:
        """The batch has begun with some runs, and made the first token of some that go on."""
        pulled: defaultdict[str, list[str]] = defaultdict(list)
        for run in started:
            if run.dispatch.kv_source is not None:
                pulled[run.dispatch.kv_source.worker_id].append(run.request_id)
        prefilled = made_first if self.role is WorkerRole.PREFILL else ()
        if pulled:
            self.on_pulled()
        if pulled or prefilled:
            self._context.spawn(self._publish(pulled, [run.request_id for run in prefilled]))

    def hand_on(self, runs: Iterable[SimulatedRun]) -> None:
        """Of those that run, the streams may go on elsewhere if the worker is for prompts now."""
        request_ids = [run.request_id for run in runs if run.first_token_ns]
        if request_ids and self.role is WorkerRole.PREFILL:
            self._context.spawn(self._publish({}, request_ids))

    async def _publish(self, pulled: dict[str, list[str]], prefilled: list[str]) -> None:
        control = self._context.bus.control
        if prefilled:
            await control.publish_prefilled(
                Prefilled(worker_id=self._worker_id, request_ids=tuple(prefilled))
            )
        for source_id, request_ids in pulled.items():
            await control.publish_pulled(
                Pulled(worker_id=source_id, request_ids=tuple(request_ids))
            )
