"""What streams have is pulled where they will go on, before they leave where they run."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import JobPhase, ScheduledJob
from millrace.scheduler.placement import placement
from millrace.scheduler.placement.placement import pull_token_s
from millrace.scheduler.stages.place import Place
from millrace.scheduler.state import SchedulerState
from millrace.schemas.control import Warm
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError
from millrace.schemas.transfer import KvSource

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
