"""Streams migrate from a worker: as fast as they can go on elsewhere if it drains or an operator
asks for it, at once if its engine is down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from millrace.scheduler.dispatch.warming import Warming
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.stages import place
from millrace.scheduler.stages.place import PlacementRound
from millrace.scheduler.state import SchedulerState
from millrace.schemas.engines import WorkerRole

_PAUSE_S = 0.02
# So many that wait for a worker's time are looked at, as others may have time for the next.
_MAX_WAITING = 4
# Between two looks for a worker that decodes, where none has had room.
_NO_ROOM_PAUSE_S = 0.2


class _Asked(NamedTuple):
    """What an operator wants to be moved, and whereto (empty: to wherever there is room)."""

    to_worker_id: str
    request_ids: frozenset[str]


class JobMigration:
    """Has other workers go on with what a worker runs, as far as there is capacity.

    From a worker whose engine runs, a stream stands still from when its run is taken away until its
    blocks have been pulled elsewhere, or computed again where they cannot be, so each leaves only
    when another worker has time for it. Where the engine is down all stand still anyway, for as
    long as the next one takes to load, and leave at once. Those that find no time or capacity stay,
    and end there or are given back.

    Whatever a dead engine ran may have killed it. So what has left one engine for that reason, and
    made no token since, stays where the next one dies: there it is tried alone, and is blamed alone
    (``workers.host.engine_intake``).
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._moving: set[str] = set()
        self._asked: dict[str, _Asked] = {}
        self._prefilled: dict[str, set[str]] = {}
        self._warming = Warming(state)
        self._is_stopped = False

    def stop(self) -> None:
        """Move nothing any more."""
        self._is_stopped = True

    @property
    def _may_move(self) -> bool:
        return self._state.bus.connected and not self._is_stopped

    def begin(self, worker: WorkerView) -> None:
        """Go on moving, if that is not under way. To be called at every heartbeat."""
        worker_id = worker.worker_id
        if not self._may_move or worker_id in self._moving:
            return
        if next(self._held(worker), None) is not None:
            self._moving.add(worker_id)
            self._state.tasks.spawn(self._move(worker_id), f"move from {worker_id}")

    def move(self, worker: WorkerView, to_worker_id: str) -> None:
        """Move what runs there now, to one worker alone if it is named; once."""
        held = frozenset(scheduled.request_id for scheduled in self._held(worker))
        if held and self._may_move:
            self._asked[worker.worker_id] = _Asked(to_worker_id, held)
            self.begin(worker)

    def hand_on(self, worker: WorkerView, request_ids: Iterable[str]) -> None:
        """Have workers that decode go on with streams whose prompts a worker has computed, as soon
        as one has room."""
        if not self._may_move:
            return
        worker_id = worker.worker_id
        if worker_id in self._prefilled:
            self._prefilled[worker_id].update(request_ids)
            return
        self._prefilled[worker_id] = set(request_ids)
        self._state.tasks.spawn(self._hand_on(worker_id), f"hand on from {worker_id}")

    def bring_ahead(self, worker: WorkerView) -> None:
        """Have what a worker for prompts has computed so far pulled where the streams will go on,
        while it computes the rest. To be called when it has told what it has."""
        status = worker.status
        if status.role is not WorkerRole.PREFILL or status.draining or status.engine_down:
            return
        if not self._may_move:
            return
        computed = self._prefilled.get(worker.worker_id, set())
        placement_round = PlacementRound(self._state, worker.status.model)
        for scheduled in self._movable(worker):
            is_fixed = scheduled.job.sampling.use_beam_search or not scheduled.can_be_pulled
            if not is_fixed and scheduled.request_id not in computed:
                self._bring_ahead(scheduled, worker, placement_round)

    def _bring_ahead(
        self, scheduled: ScheduledJob, worker: WorkerView, placement_round: PlacementRound
    ) -> None:
        warming, prefixes = self._warming, self._state.prefixes
        if not warming.is_worth_more(scheduled, scheduled.resources.num_context_tokens, worker):
            return  # nor is what is there of it, which takes longer to find out
        cached = prefixes.cached_tokens((worker,), scheduled.prefix_keys)
        if not warming.is_worth_more(scheduled, cached.get(worker.worker_id, 0), worker):
            return
        warm_worker_id = self._warming.worker_of(scheduled)
        chosen = placement_round.find_decoder_ahead(scheduled, worker, warm_worker_id)
        if chosen is not None:
            self._warming.pull_ahead(scheduled, chosen)
        elif warm_worker_id:
            self._warming.forget(scheduled)

    async def _hand_on(self, worker_id: str) -> None:
        try:
            while self._may_move:
                worker = self._state.fleet.get(worker_id)
                left = self._prefilled[worker_id]
                if worker is None or worker.status.draining or worker.status.engine_down:
                    return  # they leave for that reason
                if worker.status.role is not WorkerRole.PREFILL:
                    return  # its role was changed: they may stay
                left.intersection_update(worker.runs)
                is_full = self._hand_on_some(worker, left)
                if not left:
                    return
                await self._state.clock.sleep(_NO_ROOM_PAUSE_S if is_full else _PAUSE_S)
        finally:
            del self._prefilled[worker_id]

    def _hand_on_some(self, worker: WorkerView, request_ids: set[str]) -> bool:
        """Whether some would go, and nobody has room for them."""
        placement_round = PlacementRound(self._state, worker.status.model)
        is_full = False
        for scheduled in self._movable(worker):
            if scheduled.request_id not in request_ids:
                continue
            warm_worker_id = self._warming.worker_of(scheduled)
            chosen = placement_round.find_decoder(scheduled, worker, warm_worker_id)
            if chosen is None:
                if warm_worker_id:
                    self._warming.forget(scheduled)
                else:
                    is_full = True
            elif chosen.kv_source is None:
                request_ids.discard(scheduled.request_id)  # it would be computed again
            elif (ready := self._warming.take(scheduled, chosen)) is not None:
                request_ids.discard(scheduled.request_id)
                place.migrate(self._state, scheduled, ready)
        return is_full

    async def _move(self, worker_id: str) -> None:
        try:
            worker = self._state.fleet.get(worker_id)
            if worker is not None and worker.status.engine_down:
                await self._clear_suspects(worker)
            while self._may_move:
                worker = self._state.fleet.get(worker_id)
                if worker is None or not self._move_some(worker):
                    return
                await self._state.clock.sleep(_PAUSE_S)
        finally:
            self._moving.discard(worker_id)
            self._asked.pop(worker_id, None)

    def _move_some(self, worker: WorkerView) -> bool:
        """Whether there are more that could go in a moment."""
        status, asked = worker.status, self._asked.get(worker.worker_id)
        is_leaving = status.draining or status.engine_down
        if not is_leaving and asked is None:
            return False
        to_worker_id = "" if is_leaving or asked is None else asked.to_worker_id
        placement_round = PlacementRound(self._state, worker.status.model)
        num_waiting = 0
        for scheduled in self._movable(worker):
            if not is_leaving and asked and scheduled.request_id not in asked.request_ids:
                continue
            warm_worker_id = self._warming.worker_of(scheduled)
            chosen = placement_round.find_elsewhere(
                scheduled, worker, warm_worker_id or to_worker_id
            )
            if chosen is None:
                if warm_worker_id:
                    self._warming.forget(scheduled)
                    num_waiting += 1
                continue  # one that is shorter, or of a higher tier, may fit
            if not status.engine_down:
                ready = self._warming.take(scheduled, chosen)
                if ready is None:
                    num_waiting += 1
                    if num_waiting == _MAX_WAITING:
                        break
                    continue
                chosen = ready
            scheduled.suspicion.outlived_engine |= status.engine_down
            place.migrate(self._state, scheduled, chosen)
        return num_waiting > 0

    def _movable(self, worker: WorkerView) -> Iterator[ScheduledJob]:
        """What nobody listens to stays: it would have to begin again elsewhere. Embeddings
        leave an engine that is down only: else they are over sooner than they would start."""
        is_down = worker.status.engine_down
        for scheduled in self._held(worker):
            job = scheduled.job
            if is_down:
                may_leave = not scheduled.suspicion.outlived_engine and bool(
                    job.reply or job.pooling
                )
            else:
                may_leave = job.pooling is None
            if may_leave:
                yield scheduled

    def _held(self, worker: WorkerView) -> Iterator[ScheduledJob]:
        for request_id in list(worker.runs):
            scheduled = self._state.job_table.get(request_id)
            if scheduled is not None and scheduled.phase is JobPhase.RUNNING:
                yield scheduled

    async def _clear_suspects(self, worker: WorkerView) -> None:
        """Those whose clients have got tokens of the run that stands still now."""
        suspects = [
            scheduled
            for scheduled in self._held(worker)
            if scheduled.suspicion.outlived_engine and scheduled.job.reply
        ]
        await asyncio.gather(*map(self._clear_if_it_got_on, suspects))

    async def _clear_if_it_got_on(self, scheduled: ScheduledJob) -> None:
        state = self._state
        point = await state.bus.control.resume_point(
            scheduled.job.reply, scheduled.request_id, state.config.resume_timeout_s
        )
        if point is not None and len(point.token_ids) > scheduled.client.num_tokens_at_start:
            scheduled.suspicion.outlived_engine = False
