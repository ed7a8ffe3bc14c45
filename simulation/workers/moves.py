"""Moves of streams between simulated workers, like ``workers.host.moves``."""

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
    """Moves of a simulated worker's streams.

    It pulls the blocks of runs that have a KV source, and remembers runs that left and may still
    pull theirs from here. It tells the worker that a run came from when it needs nothing more, and
    with the role ``prefill`` it tells the schedulers which runs may continue elsewhere.
    ``on_pulled`` is called when a run has its blocks, or a pull ahead is done.
    """

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
        """Endpoint for pulls; None if blocks do not move."""
        if not self._moves_blocks:
            return None
        return TransferEndpoint(layout=_LAYOUT, token=self._worker_id, address=self._worker_id)

    @property
    def pull_tokens_per_s(self) -> float:
        """Recent pull rate, as in ``WorkerStatus``."""
        return self._context.network.tokens_per_s(self._worker_id)

    @property
    def outstanding_pull_tokens(self) -> int:
        """Tokens on their way here, as in ``WorkerStatus``."""
        return self._context.network.coming_tokens(self._worker_id)

    def begin(self, blocks: SimulatedBlocks) -> None:
        """Join the network with the worker's cache."""
        if self._moves_blocks:
            self._context.network.join(self._worker_id, blocks)

    def stop(self) -> None:
        """Leave the network."""
        self._context.network.leave(self._worker_id)

    # --- runs that leave ---

    def left(self, run: SimulatedRun) -> None:
        """Remember a run that another worker continues."""
        if self._moves_blocks and run.started_ns:
            self._departures.add(run.request_id)

    def note_pulled(self, pulled: Pulled) -> None:
        """Forget departed runs that have pulled their blocks."""
        self._departures.discard(pulled.request_ids)

    @property
    def num_kept(self) -> int:
        """Number of departed runs that may still pull."""
        return len(self._departures)

    # --- runs that come or may move ---

    def pull(self, run: SimulatedRun, on_done: Callable[[], None]) -> bool:
        """Start the pull of a run's blocks; return whether it waits. ``on_done`` ends the wait."""
        source = run.dispatch.kv_source
        if source is None or run.sequence is None:
            return False
        return self._context.network.pull(self._worker_id, source, run.sequence, on_done)

    async def warm(self, warm: Warm, *, apart: bool) -> WorkerReply:
        """Pull the blocks of a run at another worker; returns when that is over.

        ``apart``: tenants do not share cached prompts.
        """
        if not self._moves_blocks:
            return WorkerReply(
                ok=False, reason="bad_request", message="this worker pulls no blocks"
            )
        over = asyncio.Event()
        sequence = prefix_of(warm.job, warm.token_ids, apart=apart)
        if self._context.network.pull(self._worker_id, warm.kv_source, sequence, over.set):
            await over.wait()
        self.on_pulled()
        return WorkerReply(ok=True)

    def advanced(self, started: Sequence[SimulatedRun], made_first: Sequence[SimulatedRun]) -> None:
        """Report runs that the batch has started, and runs that have their first token and go
        on."""
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
        """Report running streams that may continue elsewhere, if the worker's role is prefill
        now."""
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
