"""Records of deliveries, with their continuation from other connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from millrace.bus.api import Outbox
from millrace.gateway.streams.stream import OpenStream, status_of
from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays, is_retryable, retry
from millrace.runtime.tasks import Tasks
from millrace.schemas.control import DeliveryStatistics
from millrace.schemas.errors import MillraceError
from millrace.schemas.records import DeliveryRecord

_MS_PER_S = 1e3
_NS_PER_S = 1e9
_MAX_KEPT = 4_096


_log = logging.getLogger(__name__)
_MAX_WAITING = 10_000
_NUM_SENDERS = 8
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 4.0


def statistics_of(stream: OpenStream, clock: Clock) -> DeliveryStatistics:
    """Return the statistics of the delivery so far."""
    now_s, now_ns = clock.monotonic(), clock.now_ns()

    def epoch_ns(at_s: float | None) -> int:
        return 0 if at_s is None else now_ns - round((now_s - at_s) * _NS_PER_S)

    delivery, reader = stream.delivery, stream.reader
    return DeliveryStatistics(
        received_ns=epoch_ns(delivery.received_s),
        first_token_ns=epoch_ns(delivery.first_token_s),
        last_token_ns=epoch_ns(delivery.last_token_s),
        num_replays=delivery.num_replays,
        num_epochs=reader.num_epochs,
        epoch=reader.counted_epoch,
        num_resumes=delivery.num_resumes,
        num_stalls=delivery.num_stalls,
        stalled_ms=delivery.stalled_s * _MS_PER_S,
        longest_gap_ms=delivery.longest_gap_s * _MS_PER_S,
        intake_ms=delivery.intake_s * _MS_PER_S,
    )


def continue_statistics(stream: OpenStream, seen: DeliveryStatistics, clock: Clock) -> None:
    """Continue from the statistics that a returning client had before. For tokens with an unknown
    time of delivery, the gap begins with its return.
    """
    now_s, now_ns = clock.monotonic(), clock.now_ns()

    def monotonic_s(at_ns: int) -> float | None:
        # Two machines' clocks differ: clamp times in the future.
        return None if not at_ns else now_s - max(0, now_ns - at_ns) / _NS_PER_S

    delivery = stream.delivery
    received_s = monotonic_s(seen.received_ns)
    delivery.received_s = now_s if received_s is None else received_s
    delivery.intake_s = seen.intake_ms / _MS_PER_S
    delivery.first_token_s = monotonic_s(seen.first_token_ns)
    delivery.last_token_s = monotonic_s(seen.last_token_ns)
    if delivery.last_token_s is None and stream.from_index:
        delivery.last_token_s = now_s
    delivery.num_replays = seen.num_replays
    stream.reader.count_epochs_on(seen.num_epochs, seen.epoch)
    delivery.num_resumes = seen.num_resumes + 1
    delivery.count_gaps_on(
        seen.num_stalls, seen.stalled_ms / _MS_PER_S, seen.longest_gap_ms / _MS_PER_S
    )


def delivery_record(stream: OpenStream, gateway_id: str, clock: Clock) -> DeliveryRecord:
    """Return the record of a stream that has ended, or whose client has left it. ``first_byte_ms``
    is 0 without a first token, and if its time is unknown.
    """
    now_s, delivery = clock.monotonic(), stream.delivery
    first_s, received_s = delivery.first_token_s, delivery.received_s
    return DeliveryRecord(
        request_id=stream.request_id,
        gateway_id=gateway_id,
        tenant=stream.job.tenant,
        source=stream.job.source,
        model=stream.job.model,
        first_byte_ms=0.0 if first_s is None else (first_s - received_s) * _MS_PER_S,
        total_ms=(now_s - received_s) * _MS_PER_S,
        tokens_delivered=stream.num_seen,
        num_replays=delivery.num_replays,
        num_epochs=stream.reader.num_epochs,
        num_resumes=delivery.num_resumes,
        num_stalls=delivery.num_stalls,
        stalled_ms=delivery.stalled_s * _MS_PER_S,
        longest_gap_ms=delivery.longest_gap_s * _MS_PER_S,
        intake_ms=delivery.intake_s * _MS_PER_S,
        outcome=stream.outcome or status_of(stream).value,
        done_ns=clock.now_ns(),
    )


class DeliveryHistory:
    """Statistics of answers that may still be resumed, by their jobs: ended rounds, and ends that
    no client has taken. It drops entries older than ``keep_s``, and the oldest of too many.
    """

    def __init__(self, clock: Clock, keep_s: float) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._kept: OrderedDict[str, tuple[float, dict[str, DeliveryStatistics]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request_id: str, seen: Mapping[str, DeliveryStatistics]) -> None:
        """Add to the statistics of an answer."""
        if not seen:
            return
        known = self.of(request_id)
        self._kept[request_id] = (self._clock.monotonic(), {**known, **seen})
        self._kept.move_to_end(request_id)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def keep_stream(self, request_id: str, stream: OpenStream) -> None:
        """Add one stream of an answer."""
        self.keep(request_id, {stream.request_id: statistics_of(stream, self._clock)})

    def of(self, request_id: str) -> dict[str, DeliveryStatistics]:
        """Return the known statistics of an answer."""
        kept_s, seen = self._kept.get(request_id, (0.0, {}))
        return seen if self._clock.monotonic() - kept_s <= self._keep_s else {}

    def forget(self, request_id: str) -> None:
        """Drop an answer that will not be resumed here: its client has the end, or another gateway
        has it.
        """
        self._kept.pop(request_id, None)


class Deliveries:
    """Publisher of delivery records in the background, each retried until it is stored.
    ``num_lost`` counts records lost to a full queue, or that the outbox will never take.

    Owns its sender tasks: ``start`` starts them, ``close`` waits a moment for queued records and
    ends them.
    """

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._waiting: asyncio.Queue[DeliveryRecord] = asyncio.Queue(_MAX_WAITING)
        self._senders = Tasks()
        self.num_lost = 0

    def start(self) -> None:
        for _ in range(_NUM_SENDERS):
            self._senders.keep(self._send_all, self._clock, "send delivery records")

    def put(self, record: DeliveryRecord) -> None:
        """Queue a record; never waits. A full queue (the bus is unreachable for long) drops it."""
        try:
            self._waiting.put_nowait(record)
        except asyncio.QueueFull:
            self._lose(record, "too many records wait for the bus")

    async def close(self, timeout_s: float) -> None:
        """Send queued records for up to ``timeout_s``, then stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._waiting.join()
        await self._senders.close()

    async def _send_all(self) -> None:
        while True:
            record = await self._waiting.get()
            delays = doubling_delays(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            send = partial(self._outbox.publish, record)
            try:
                await retry(send, delays, self._clock.sleep, retried=_may_pass)
            except MillraceError as error:
                self._lose(record, str(error))
            except Exception:
                self._lose(record, "it could not be sent")
                raise
            finally:
                self._waiting.task_done()

    def _lose(self, record: DeliveryRecord, why: str) -> None:
        self.num_lost += 1
        _log.warning(
            "a delivery record was lost", extra={"request_id": record.request_id, "why": why}
        )


def _may_pass(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or is_retryable(error)
