"""Streams migrate from a worker: as fast as they can go on elsewhere if it drains or an operator
asks for it, at once if its engine is down."""

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


# A worker is asked for no more while what it pulls and computes before takes longer than this:
# those that share its memory's bandwidth would all be late.
_LEAD_S = 0.05
# What is less is computed in no more time than it takes to ask for it.
_SHORT_TOKENS = 64
# Between two streams that leave for the same worker, at most.
_MAX_GAP_S = 0.1
# As long as an engine waits for blocks at most, and a little more for the way.
_TIMEOUT_S = 2.5
# What takes less time to pull is not pulled before its prompt has been computed.
_AHEAD_S = 0.02


@dataclass(slots=True)
class _Pull:
    """Of the first ``num_tokens`` of a stream, or, ``is_ahead``, of a prompt that is being computed
    and has more to come."""

    scheduled: ScheduledJob
    worker_id: str
    num_tokens: int
    is_ahead: bool = False
    is_over: bool = False
    has_come: bool = False


class Warming:
    """Has workers pull the KV cache of streams that are to leave others, while these go on there.
    A stream then stands still for the tokens alone that it has made meanwhile. Of a long prompt
    what has been computed is pulled while the rest is.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._pulls: dict[str, _Pull] = {}
        self._busy_until_s: dict[str, float] = {}

    def worker_of(self, scheduled: ScheduledJob) -> str:
        """Where a stream is to go on, as what it has is there or comes there; empty: nowhere in
        particular."""
        pull = self._pulls.get(scheduled.request_id)
        return "" if pull is None else pull.worker_id

    def forget(self, scheduled: ScheduledJob) -> None:
        """It cannot go on there."""
        del self._pulls[scheduled.request_id]

    def take(self, scheduled: ScheduledJob, place: Place) -> Place | None:
        """The place for a stream that may leave now, or None: its worker has no time so far, or
        pulls what the stream has. That begins with one call, and others are to follow, with places
        at that ``worker_of`` it, until it is over."""
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
        """Whether to pull ahead what a ``holder`` has by now of a prompt that it computes, its
        first ``num_tokens``: not while it pulls some of them, nor for what comes at once later."""
        pull = self._pulls.get(scheduled.request_id)
        if pull is not None and not pull.is_over:
            return False
        num_more = num_tokens - (pull.num_tokens if pull is not None else 0)
        return num_more * pull_token_s(holder, placement.prefill_token_s(holder)) >= _AHEAD_S

    def pull_ahead(self, scheduled: ScheduledJob, place: Place) -> None:
        """Have a place pull what there is so far of a prompt. Its stream leaves for there."""
        if place.kv_source is not None and placement.work_ahead_s(place.worker) <= _LEAD_S:
            self._begin(scheduled, place, is_ahead=True)

    def _note_left(self, worker: WorkerView, num_tokens: int, now_s: float) -> None:
        """A worker brings what came from its main memory to its device before it goes on with a
        stream, which is taken to last as long as to pull it: the next one leaves after that."""
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
        """Whatever goes wrong, the stream leaves then, and pulls or computes what it needs."""
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
        """What ended while it was pulled, or before it left, comes no more."""
        self._pulls = {
            request_id: pull
            for request_id, pull in self._pulls.items()
            if not pull.is_over or pull.scheduled.phase is JobPhase.RUNNING
        }


def _num_at(place: Place) -> int:
    """How many of the tokens are at a place once what is pulled has come."""
    return place.num_cached_tokens + place.num_pulled_tokens
