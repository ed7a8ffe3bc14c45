"""What streams have is pulled where they will go on, before they leave where they run."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.scheduler.dispatch.context import SchedulerContext
from millrace.scheduler.dispatch.placement_round import Place
from millrace.scheduler.jobs.scheduled_job import ScheduledJob
from millrace.schemas.control import Warm
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError

# As long as an engine waits for blocks at most, and a little more for the way.
_TIMEOUT_S = 2.5


@dataclass(slots=True)
class _Pull:
    request_id: str
    is_over: bool = False
    has_come: bool = False


class Warming:
    """Has workers pull the KV cache of streams that are to leave others, while these go on there:
    for each worker one stream at a time, as those that share the memory's bandwidth would all be
    late. A stream then stands still for the tokens alone that it has made meanwhile.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._by_worker: dict[str, _Pull] = {}

    def has(self, request_id: str, worker_id: str) -> bool:
        """Whether a worker pulls for a stream, or has."""
        pull = self._by_worker.get(worker_id)
        return pull is not None and pull.request_id == request_id

    def take(self, scheduled: ScheduledJob, place: Place) -> Place | None:
        """The place for a stream that may leave now, or None: what it has is being pulled. That
        begins with the first call, and the next ones are to follow until it is over."""
        if place.kv_source is None:
            return place
        worker_id, request_id = place.worker.worker_id, scheduled.request_id
        pull = self._by_worker.get(worker_id)
        if pull is None or (pull.is_over and pull.request_id != request_id):
            self._by_worker[worker_id] = pull = _Pull(request_id)
            place.worker.pending_pull_tokens += place.num_pulled_tokens
            name = f"warm {worker_id} for {request_id}"
            self._context.tasks.spawn(self._pull(pull, scheduled, place), name)
            return None
        if not pull.is_over or pull.request_id != request_id:
            return None
        del self._by_worker[worker_id]
        if not pull.has_come:
            return place
        num_there = place.num_cached_tokens + place.num_pulled_tokens
        return place._replace(num_cached_tokens=num_there, num_pulled_tokens=0)

    async def _pull(self, pull: _Pull, scheduled: ScheduledJob, place: Place) -> None:
        """Whatever goes wrong, the stream leaves then, and pulls or computes what it needs."""
        control, config, job = self._context.bus.control, self._context.config, scheduled.job
        assert place.kv_source is not None
        try:
            point = await control.resume_point(
                job.reply, scheduled.request_id, config.resume_timeout_s
            )
            token_ids = () if point is None else point.token_ids
            warm = Warm(job=job, kv_source=place.kv_source, token_ids=token_ids)
            reply = await control.command(place.worker.worker_id, warm, _TIMEOUT_S)
            pull.has_come = reply is not None and reply.ok
        except (BusUnavailableError, PayloadTooLargeError):
            pass
        finally:
            pull.is_over = True
