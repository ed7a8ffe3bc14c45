"""Migration of streams between workers.

Streams leave a draining worker, or a worker that an operator names, as fast as others have
capacity. They leave a worker whose engine is down at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.placement import placement
from millrace.scheduler.placement.placement import pull_token_s
from millrace.scheduler.stages import place
from millrace.scheduler.stages.place import Place, PlacementRound
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Warm
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError
from millrace.schemas.transfer import KvSource

_PAUSE_S = 0.02
# Number of streams checked while they wait for a worker's time. The next stream may go elsewhere.
_MAX_WAITING = 4
# Pause between two searches for a worker that decodes, after none had room.
_NO_ROOM_PAUSE_S = 0.2


class _Asked(NamedTuple):
    """Streams that an operator wants moved, and the target worker (empty: any worker)."""

    to_worker_id: str
    request_ids: frozenset[str]


class JobMigration:
    """Migration of a worker's streams to other workers, within their capacity.

    A stream on a running engine stands still from when its run is cancelled until another worker
    has pulled its blocks, or computed them again. So it leaves only when the other worker has time
    for it. If the engine is down, all its streams stand still until the next engine is loaded, so
    they leave at once. Streams for which no worker has time or capacity stay. They end there or are
    given back.

    Any request of a dead engine may have killed it. A request that left a dead engine and made no
    token since stays if the next engine dies, too. It is then tried alone, and blamed alone
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
        """Start no more migrations."""
        self._is_stopped = True

    @property
    def _may_move(self) -> bool:
        return self._state.bus.connected and not self._is_stopped

    def begin(self, worker: WorkerView) -> None:
        """Start moving a worker's streams unless that is under way. Called at every heartbeat."""
        worker_id = worker.worker_id
        if not self._may_move or worker_id in self._moving:
            return
        if next(self._held(worker), None) is not None:
            self._moving.add(worker_id)
            self._state.tasks.spawn(self._move(worker_id), f"move from {worker_id}")

    def move(self, worker: WorkerView, to_worker_id: str) -> None:
        """Move the worker's present streams once, only to ``to_worker_id`` if it is not empty."""
        held = frozenset(scheduled.request_id for scheduled in self._held(worker))
        if held and self._may_move:
            self._asked[worker.worker_id] = _Asked(to_worker_id, held)
            self.begin(worker)

    def hand_on(self, worker: WorkerView, request_ids: Iterable[str]) -> None:
        """Move streams whose prompts are computed to workers that decode, as soon as one has
        room."""
        if not self._may_move:
            return
        worker_id = worker.worker_id
        if worker_id in self._prefilled:
            self._prefilled[worker_id].update(request_ids)
            return
        self._prefilled[worker_id] = set(request_ids)
        self._state.tasks.spawn(self._hand_on(worker_id), f"hand on from {worker_id}")

    def bring_ahead(self, worker: WorkerView) -> None:
        """Pull the computed part of prompts ahead of time to the workers that will decode them.

        The prefill worker computes the rest meanwhile. Called when the worker has reported its
        blocks.
        """
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
            return  # the cached part cannot be worth more, and finding it takes longer
        cached = prefixes.cached_tokens((worker,), scheduled.prefix_keys)
        if not warming.is_worth_more(scheduled, cached.get(worker.worker_id, 0), worker):
            return
        warm_worker_id = self._warming.worker_of(scheduled)
        chosen = placement_round.find_decoder(scheduled, worker, warm_worker_id, is_ahead=True)
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
                    return  # drain or engine failure moves these streams
                if worker.status.role is not WorkerRole.PREFILL:
                    return  # the role was changed: streams may stay
                left.intersection_update(worker.runs)
                is_full = self._hand_on_some(worker, left)
                if not left:
                    return
                await self._state.clock.sleep(_NO_ROOM_PAUSE_S if is_full else _PAUSE_S)
        finally:
            del self._prefilled[worker_id]

    def _hand_on_some(self, worker: WorkerView, request_ids: set[str]) -> bool:
        """Move computed prompts; return True if some found no worker with room."""
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
                request_ids.discard(scheduled.request_id)  # a move would compute it again
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
        """Move as many streams as possible; return True if more may go in a moment."""
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
                continue  # a shorter stream, or one of a higher tier, may fit
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
        """Yield streams that may leave the worker.

        Jobs without a reader stay: they would begin again elsewhere. Embeddings leave only an
        engine that is down, as they end sooner than they would start elsewhere.
        """
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
        """Clear the suspicion of streams whose clients have tokens of the run that stands still."""
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


# A worker gets no further pull while its pending work takes longer than this. Pulls that share its
# memory bandwidth would all be late.
_LEAD_S = 0.05
# Computing fewer tokens than this takes no longer than asking for them.
_SHORT_TOKENS = 64
# Longest gap between two streams that leave for the same worker.
_MAX_GAP_S = 0.1
# The longest time that an engine waits for blocks, plus a margin for the way.
_TIMEOUT_S = 2.5
# Blocks that take less time to pull than this are not pulled ahead.
_AHEAD_S = 0.02


@dataclass(slots=True)
class _Pull:
    """Pull of the first ``num_tokens`` of a stream.

    ``is_ahead``: the prompt is still being computed, so more will follow.
    """

    scheduled: ScheduledJob
    worker_id: str
    num_tokens: int
    is_ahead: bool = False
    is_over: bool = False
    has_come: bool = False


class Warming:
    """KV pulls ahead of a migration, while the stream goes on at its present worker.

    The stream then stands still only for the tokens that it made meanwhile. The computed part of a
    long prompt is pulled while the rest is computed.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pulls: dict[str, _Pull] = {}
        self._busy_until_s: dict[str, float] = {}

    def worker_of(self, scheduled: ScheduledJob) -> str:
        """Return the worker that has or pulls the stream's blocks; empty if there is none."""
        pull = self._pulls.get(scheduled.request_id)
        return "" if pull is None else pull.worker_id

    def forget(self, scheduled: ScheduledJob) -> None:
        """Forget the pull of a stream that cannot go on at that worker."""
        del self._pulls[scheduled.request_id]

    def take(self, scheduled: ScheduledJob, place: Place) -> Place | None:
        """Return the place for a stream that may leave now, else None.

        None means that the worker has no time yet, or pulls the stream's blocks. The first call
        begins the pull. The caller calls again, with a place at ``worker_of(scheduled)``, until the
        pull is over.
        """
        pull = self._pulls.get(scheduled.request_id)
        if pull is None:
            if placement.work_ahead_s(place.worker) > _LEAD_S:
                return None
            if place.kv_source is None or place.num_pulled_tokens < _SHORT_TOKENS:
                return place
            self._begin(scheduled, place)
            return None
        now_s = self._state.clock.monotonic()
        if not pull.is_over or self._busy_until_s.get(pull.worker_id, now_s) > now_s:
            return None
        if pull.is_ahead and _num_at(place) - pull.num_tokens >= _SHORT_TOKENS:
            self._begin(scheduled, place)
            return None
        del self._pulls[scheduled.request_id]
        if not pull.has_come:
            return place
        num_there = _num_at(place)
        self._note_left(place.worker, num_there, now_s)
        return place._replace(num_cached_tokens=num_there, num_pulled_tokens=0)

    def is_worth_more(self, scheduled: ScheduledJob, num_tokens: int, holder: WorkerView) -> bool:
        """Return whether a prompt's first ``num_tokens`` are worth pulling ahead from ``holder``.

        They are not while a pull is under way, nor if pulling them later takes almost no time.
        """
        pull = self._pulls.get(scheduled.request_id)
        if pull is not None and not pull.is_over:
            return False
        num_more = num_tokens - (pull.num_tokens if pull is not None else 0)
        return num_more * pull_token_s(holder, placement.prefill_token_s(holder)) >= _AHEAD_S

    def pull_ahead(self, scheduled: ScheduledJob, place: Place) -> None:
        """Pull the computed part of a prompt to a place. The stream will go on there."""
        if place.kv_source is not None and placement.work_ahead_s(place.worker) <= _LEAD_S:
            self._begin(scheduled, place, is_ahead=True)

    def _note_left(self, worker: WorkerView, num_tokens: int, now_s: float) -> None:
        """Note when a worker will have copied pulled blocks from main memory to its device.

        The copy is assumed to take as long as the pull. The next stream leaves after that.
        """
        took_s = num_tokens * pull_token_s(worker, placement.prefill_token_s(worker))
        later = {one: until_s for one, until_s in self._busy_until_s.items() if until_s > now_s}
        self._busy_until_s = later | {worker.worker_id: now_s + min(took_s, _MAX_GAP_S)}

    def _begin(self, scheduled: ScheduledJob, place: Place, *, is_ahead: bool = False) -> None:
        worker, request_id = place.worker, scheduled.request_id
        pull = _Pull(scheduled, worker.worker_id, _num_at(place), is_ahead)
        self._pulls[request_id] = pull
        worker.await_pull(place.num_pulled_tokens)
        assert place.kv_source is not None
        name = f"warm {worker.worker_id} for {request_id}"
        self._state.tasks.spawn(self._run(pull, place.kv_source), name)

    async def _run(self, pull: _Pull, source: KvSource) -> None:
        """Pull blocks to a worker.

        After an error the stream still leaves, and pulls or computes the rest.
        """
        control, job = self._state.bus.control, pull.scheduled.job
        try:
            token_ids: tuple[int, ...] = ()
            if job.reply and not pull.is_ahead:  # else it begins again behind its prompt
                point = await control.resume_point(
                    job.reply, job.request_id, self._state.config.resume_timeout_s
                )
                token_ids = () if point is None else point.token_ids
            warm = Warm(job=job, kv_source=source, token_ids=token_ids)
            reply = await control.command(pull.worker_id, warm, _TIMEOUT_S)
            pull.has_come = reply is not None and reply.ok
        except (BusUnavailableError, PayloadTooLargeError):
            pass
        finally:
            pull.is_over = True
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Drop pulls of streams that ended meanwhile."""
        self._pulls = {
            request_id: pull
            for request_id, pull in self._pulls.items()
            if not pull.is_over or pull.scheduled.phase is JobPhase.RUNNING
        }


def _num_at(place: Place) -> int:
    """Return how many tokens a place has once its pull is done."""
    return place.num_cached_tokens + place.num_pulled_tokens
