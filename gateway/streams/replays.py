"""Replays of missing frames: requested from workers, then from the store of results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from millrace.bus.api import Bus
from millrace.bus.running_requests import RunningRequest
from millrace.bus.stored_results import frames_of
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.stream import OpenStream
from millrace.runtime.clock import Clock
from millrace.schemas.control import Replay, WorkerReply
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Failed, Frame

_REPLAY_TIMEOUT_S = 1.0
_MIN_INTERVAL_S = 0.2
_MAX_AT_ONCE = 64
_LOST_AFTER_S = 5.0
# After a partition the gateway may reach the index of requests before the worker that has the
# answer and the store that has its result. After it learnt of the end, it asks both for at most
# this time.
_UNREACHABLE_AFTER_S = 15.0
_MAX_FRUITLESS = 3
# Maximum number of other workers that are asked to test another server.
_MAX_OTHERS = 16
# Timeout of a query to a worker whose heartbeats stopped, before other servers are tried.
_SILENT_WORKER_TIMEOUT_S = 0.3


class RunningRequestReader(Protocol):
    """Subset of ``bus.running_requests.RunningRequestIndex`` that the gateway uses."""

    async def lookup(self, request_id: str) -> RunningRequest | None: ...


class Replays:
    """Requester of missing frames. ``on_frame`` gets the frames of a stored result; ``on_lost``
    ends a stream whose answer was computed and lost.
    """

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        fleet: FleetView,
        clock: Clock,
        generations: RunningRequestReader | None,
        on_frame: Callable[[str, Frame], None],
        on_lost: Callable[[OpenStream, Failed], None],
    ) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._fleet = fleet
        self._clock = clock
        self._generations = generations
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    def is_due(self, stream: OpenStream) -> bool:
        """Return whether a replay may be requested now; if so, mark it as requested."""
        replay = stream.replay
        due = not (
            replay.is_asked
            or self._clock.monotonic() < replay.not_before_s
            or (stream.cancellation is not None and not stream.is_copy)
        )
        replay.is_asked = replay.is_asked or due
        return due

    async def ask(self, stream: OpenStream) -> None:
        """Ask the stream's worker, or, if it does not know the request, every worker of the
        model.
        """
        try:
            async with self._slots:
                if stream.ended:
                    return
                stream.delivery.num_replays += 1
                answers: list[bool | None] = []
                async for worker_id in self._candidates(stream):
                    answers.append(await self._ask_worker(worker_id, stream))
                    if answers[-1]:
                        await self._end_if_fruitless(stream)
                        return
                nobody_has_it = bool(answers) and None not in answers
                await self._end_if_over(stream, nobody_has_it=nobody_has_it)
                is_over = stream.replay.over_since_s is not None
                if nobody_has_it and not is_over and not stream.replay.is_foreign:
                    # The job waits in the queue; its frames will come without a replay.
                    stream.replay.is_needed = False
        finally:
            stream.replay.is_asked = False
            stream.replay.not_before_s = self._clock.monotonic() + _MIN_INTERVAL_S

    async def look_up(self, stream: OpenStream) -> None:
        """Look up whether a silent stream has begun, or is over, since the frames may have been
        lost with a connection. If so, request a replay.
        """
        try:
            async with self._slots:
                if await self._has_begun(stream) or await self._has_left_the_queue(stream):
                    stream.replay.is_needed = True
        finally:
            stream.replay.is_asked = False
            stream.replay.not_before_s = self._clock.monotonic()

    async def _candidates(self, stream: OpenStream) -> AsyncIterator[str]:
        """Yield the worker whose tokens were read, the worker that the index names, then the other
        workers of the model. The index may know a worker whose tokens and heartbeats did not come
        here.
        """
        known: list[str] = []
        if stream.reader.started is not None:
            known = [stream.reader.started.worker_id]
            yield known[0]
        if self._generations is not None:
            generation = await self._generations.lookup(stream.request_id)
            # The worker_id is empty if no worker has started the request.
            if generation is not None and generation.worker_id not in {"", *known}:
                known.append(generation.worker_id)
                yield known[-1]
        for worker in self._fleet.live_workers(stream.job.model):
            if worker.worker_id not in known:
                yield worker.worker_id

    async def _ask_worker(self, worker_id: str, stream: OpenStream) -> bool | None:
        """Ask a worker. Return True if it sends the frames again, False if it does not know them,
        None without an answer. A worker whose heartbeats are missing may be behind a broken link:
        it is then asked over the other servers of the bus.
        """
        replay = Replay(
            request_id=stream.request_id,
            from_index=stream.reader.next_index,
            reply=self._gateway_id,
        )
        is_silent = self._fleet.is_silent(worker_id)
        timeout_s = _SILENT_WORKER_TIMEOUT_S if is_silent else _REPLAY_TIMEOUT_S
        answer: WorkerReply | None = None
        try:
            answer = await self._bus.control.command(worker_id, replay, timeout_s)
            if answer is None and is_silent:
                heard = [worker.worker_id for worker in self._fleet.live_workers()]
                others = [name for name in heard if not self._fleet.is_silent(name)]
                if not await self._bus.reach(worker_id, replay, timeout_s, others[:_MAX_OTHERS]):
                    return None
                # Frames that it sent meanwhile went over the old server.
                answer = await self._bus.control.command(worker_id, replay, _REPLAY_TIMEOUT_S)
        except (MillraceError, TimeoutError):
            return None
        if answer is None:
            return None
        if answer.ok:
            stream.replay.is_needed = False
        return answer.ok

    async def _end_if_fruitless(self, stream: OpenStream) -> None:
        """End a stream after fruitless replays of an attempt with an older epoch, whose frames are
        dropped. Such an attempt ends a request if the queue forgot its deliveries, and with them
        the newer attempt: once the job is answered, no frames will come.
        """
        replay, now_s = stream.replay, self._clock.monotonic()
        replay.note_answer(stream.reader.next_index, now_s)
        is_fruitless = (
            replay.num_fruitless >= _MAX_FRUITLESS
            and now_s - replay.fruitless_since_s >= _LOST_AFTER_S
        )
        if is_fruitless and await self._has_left_the_queue(stream):
            self._lose(stream)

    async def _end_if_over(self, stream: OpenStream, *, nobody_has_it: bool) -> None:
        """End a stream whose frames no worker sends, once its request has been over for long
        enough: a worker that did not answer, or the store of results, may still have them.
        """
        replay = stream.replay
        if stream.job.store_result and await self._read_result(stream):
            return
        silent_s = self._clock.monotonic() - stream.last_frame_s
        if silent_s < _LOST_AFTER_S and not replay.is_needed:
            return
        is_over = await self._is_finished(stream) or (
            silent_s >= _LOST_AFTER_S and await self._has_left_the_queue(stream)
        )
        now_s = self._clock.monotonic()
        if not is_over:
            replay.over_since_s = None
            return
        if replay.over_since_s is None:
            replay.over_since_s = now_s
        is_certain = nobody_has_it and not stream.job.store_result
        linger_s = _LOST_AFTER_S if is_certain else _UNREACHABLE_AFTER_S
        if now_s - replay.over_since_s >= linger_s:
            self._lose(stream)

    def _lose(self, stream: OpenStream) -> None:
        if not stream.ended:
            message = (
                "The request is over, but the end of its answer was lost on the way. Send it again."
            )
            self._on_lost(stream, Failed(code="answer_lost", message=message, retryable=True))

    async def _has_begun(self, stream: OpenStream) -> bool:
        return (
            self._generations is not None
            and await self._generations.lookup(stream.request_id) is not None
        )

    async def _is_finished(self, stream: OpenStream) -> bool:
        """Return whether the index has the request as finished; False while the index is
        unreachable.
        """
        if self._generations is None:
            return False
        known = await self._generations.lookup(stream.request_id)
        return known is not None and known.finished

    async def _has_left_the_queue(self, stream: OpenStream) -> bool:
        """Return whether its job is answered: its worker may have died before it updated the
        index.
        """
        if stream.stream_sequence is None:
            return False
        try:
            return not await self._bus.jobs.is_open(stream.stream_sequence)
        except (MillraceError, TimeoutError):
            return False

    async def _read_result(self, stream: OpenStream) -> bool:
        try:
            result = await self._bus.results.fetch(stream.job.tenant, stream.request_id)
        except (MillraceError, TimeoutError):
            return False
        if result is None:
            return False
        for frame in frames_of(result, stream.reader.epoch):
            self._on_frame(stream.request_id, frame)
        return stream.ended
