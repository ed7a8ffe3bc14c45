"""Pulls one model's jobs when there is room for them, and makes them ready."""

from __future__ import annotations

import logging

from bus.api import LeasedJob
from scheduler.entry import Entry, State
from scheduler.lane import Lane
from scheduler.parts import Parts
from scheduler.sender import Sender
from scheduler.verdicts import failed, refused
from schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)

_MAX_JOBS_PER_PULL = 64
_PULL_TIMEOUT_S = 5.0
_RETRY_S = 0.25


class Intake:
    """Keeps one pull outstanding whenever a worker has room, and none otherwise."""

    def __init__(self, parts: Parts, lane: Lane) -> None:
        self._parts = parts
        self._lane = lane
        self._sender = Sender(parts)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        lane = self._lane
        while True:
            num_wanted = min(lane.num_wanted, _MAX_JOBS_PER_PULL)
            if num_wanted <= 0:
                lane.wake.clear()
                await lane.wake.wait()
                continue
            try:
                pulled = await self._parts.bus.jobs.pull(lane.model, num_wanted, _PULL_TIMEOUT_S)
            except BusUnavailableError as error:
                logger.warning(
                    "the queue cannot be read",
                    extra={"model": lane.model, "reason": error.message},
                )
                await self._parts.clock.sleep(_RETRY_S)
                continue
            for leased in pulled:
                self.admit(leased)

    def admit(self, leased: LeasedJob) -> None:
        """Answer for a delivered job from now on."""
        now_s = self._parts.clock.monotonic()
        entry = self._parts.table.get(leased.job.request_id)
        if entry is not None and entry.stream_sequence == leased.stream_sequence:
            entry.take_over(leased, now_s)
            if entry.state is State.RUNNING:
                self._parts.tasks.spawn(
                    self._lane.continue_where_it_runs(entry, entry.worker_id),
                    f"continue {entry.request_id}",
                )
            return
        if entry is not None:
            # The same id was published anew, so the former job had ended.
            self._lane.ended(entry)
        entry = Entry.of(leased, now_s)
        self._parts.table.add(entry)
        self._lane.num_preparing += 1
        self._parts.tasks.spawn(self._prepare(entry), f"prepare {entry.request_id}")

    async def _prepare(self, entry: Entry) -> None:
        try:
            await self._make_ready(entry)
        except MillraceError as error:
            self._lane.end(entry, refused(error))
        except Exception as error:
            logger.exception("a job could not be prepared", extra={"request_id": entry.request_id})
            message = f"The job could not be prepared: {type(error).__name__}."
            self._lane.end(entry, failed(MillraceError.code, message, retryable=False))
        finally:
            self._lane.num_preparing -= 1
            self._lane.pump()

    async def _make_ready(self, entry: Entry) -> None:
        parts = self._parts
        verdict = parts.unwanted(entry)
        if verdict is None:
            entry.job = await parts.shelf.prepare(entry.job)
            verdict = parts.unwanted(entry)
        if entry.is_ended:
            return
        if verdict is not None:
            self._lane.end(entry, verdict)
        elif entry.ran_before:
            await self._make_ready_again(entry)
        else:
            self._lane.enqueue(entry)

    async def _make_ready_again(self, entry: Entry) -> None:
        """A job that was delivered before may be answered, or run somewhere still."""
        holder = await self._sender.last_holder(entry)
        if entry.is_ended:
            return
        if holder is None:
            self._lane.answered(entry)
        elif holder and self._parts.fleet.get(holder) is not None:
            await self._lane.continue_where_it_runs(entry, holder)
        else:
            self._lane.enqueue(entry)
