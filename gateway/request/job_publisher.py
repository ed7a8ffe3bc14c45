"""A response's jobs into the queue: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from millrace.bus.api import Bus
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.stream import OpenStream
from millrace.gateway.streams.streams import StreamTable
from millrace.runtime.clock import Clock
from millrace.schemas.jobs import Job
from millrace.schemas.records import ClientEnd


class JobPublisher:
    """Publishes jobs whose streams are open and for which room is reserved."""

    def __init__(self, bus: Bus, streams: StreamTable, clock: Clock) -> None:
        self._bus = bus
        self._streams = streams
        self._clock = clock

    async def publish(
        self,
        response: ResponseStream,
        reservation_id: str,
        jobs: Sequence[Job],
        streams: Sequence[OpenStream],
        first_reply: str = "",
    ) -> None:
        """Returns when the queue has stored all jobs. If one cannot be stored those that were are
        cancelled, what was reserved is given back, and the error is raised. Frames of a job that
        the queue had already may go to ``first_reply``."""
        since_ns = self._clock.now_ns()
        try:
            stored = await asyncio.gather(
                *(self._bus.jobs.publish(job, reserved=True) for job in jobs),
                return_exceptions=True,
            )
        except BaseException:
            for stream in streams:
                self._streams.discard(stream)
            response.release(reservation_id)
            raise
        failed = next((one for one in stored if isinstance(one, BaseException)), None)
        if response.trace is not None:
            error = "" if failed is None else type(failed).__name__
            response.trace.record_publish(jobs, since_ns, error)
        for stream, published in zip(streams, stored, strict=True):
            if isinstance(published, BaseException):
                self._streams.discard(stream)
                continue
            if published.duplicate:
                if first_reply:
                    stream.job = replace(stream.job, reply=first_reply)
                self._streams.follow(stream)
            self._streams.accept(stream, published.stream_sequence)
            if failed is not None:
                self._streams.abort(stream, ClientEnd.REFUSED)
        if failed is not None:
            response.release(reservation_id)
            raise failed
