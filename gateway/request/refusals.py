"""Records of the gateway's refusals: a refused request has no job, so no other process records
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import NamedTuple

from millrace.bus.api import Outbox
from millrace.gateway.errors import Refusal
from millrace.gateway.metrics import Metrics
from millrace.gateway.request.failure_log import FailureLog
from millrace.gateway.tenancy.identity import Caller
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.errors import MillraceError
from millrace.schemas.records import MAX_REFUSED_IDS, OTHER_REFUSALS, RefusalRecord

_log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_KINDS = 512
MAX_KINDS_OF_TENANT = 32
_LINGER_S = 0.005
_FIRST_ERROR_STATUS = 400
_CLIENT_LEFT = 499


class _Kind(NamedTuple):
    """Refusals that are recorded as one."""

    tenant: str
    key_id: str
    door: str
    status: int
    code: str
    limit: str


class _Tally:
    __slots__ = ("count", "first_ns", "last_ns", "request_ids")

    def __init__(self, now_ns: int) -> None:
        self.count = 0
        self.first_ns = now_ns
        self.last_ns = now_ns
        self.request_ids: list[str] = []

    def add(self, now_ns: int, request_id: str) -> None:
        self.count += 1
        self.last_ns = now_ns
        if request_id and len(self.request_ids) < MAX_REFUSED_IDS:
            self.request_ids.append(request_id)


class RefusalRecords:
    """Aggregator of refusals. It counts them and publishes a record of each kind every second, so
    that the outbox gets at most ``MAX_KINDS`` + 1 records a second.

    A tenant (unknown tenants count as one) has at most ``MAX_KINDS_OF_TENANT`` kinds per interval;
    further kinds are counted as ``OTHER_REFUSALS``, still under the tenant's name as long as there
    is room. While the outbox is unreachable, nothing is lost: counting continues within the same
    bounds, and the interval is extended. A record that may have been stored is published again
    unchanged, which stores it once.

    Owns its task: ``start`` starts it, ``close`` publishes the rest, for a moment.
    """

    def __init__(
        self,
        outbox: Outbox,
        clock: Clock,
        gateway_id: str,
        metrics: Metrics,
        failure_log: FailureLog,
    ) -> None:
        self._outbox = outbox
        self._failure_log = failure_log
        self._clock = clock
        self._gateway_id = gateway_id
        self._metrics = metrics
        self._tallies: dict[_Kind, _Tally] = {}
        self._num_kinds_of: Counter[str] = Counter()
        self._unsent: list[RefusalRecord] = []
        self._tasks = Tasks()

    @property
    def num_waiting(self) -> int:
        """Return the number of held kinds and records."""
        return len(self._tallies) + len(self._unsent)

    def start(self) -> None:
        self._tasks.repeat(self.flush, INTERVAL_S, self._clock, "refusals")

    def note(
        self, door: str, refusal: Refusal, caller: Caller | None, request_id: str = ""
    ) -> None:
        """Count and log a refusal of ``door``, a route or a predefined name. Returns at once. A
        client that left was not refused.
        """
        if refusal.status < _FIRST_ERROR_STATUS or refusal.status == _CLIENT_LEFT:
            return
        status = str(refusal.status)
        self._metrics.refused_requests.labels(door, status, refusal.code).inc()
        tenant, key_id = ("", "") if caller is None else (caller.tenant, caller.key_id)
        self._failure_log.refused(door, refusal, tenant, request_id)
        kind = _Kind(tenant, key_id, door, refusal.status, refusal.code, refusal.limit)
        now_ns = self._clock.now_ns()
        tally = self._tallies.get(kind) or self._new_tally(kind, now_ns)
        tally.add(now_ns, request_id)

    def _new_tally(self, kind: _Kind, now_ns: int) -> _Tally:
        if self._num_kinds_of[kind.tenant] >= MAX_KINDS_OF_TENANT:
            kind = _Kind(kind.tenant, "", OTHER_REFUSALS, kind.status // 100 * 100, "", "")
        if len(self._tallies) >= MAX_KINDS and kind not in self._tallies:
            kind = _Kind("", "", OTHER_REFUSALS, 0, "", "")
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = _Tally(now_ns)
            self._num_kinds_of[kind.tenant] += 1
        return tally

    async def flush(self) -> bool:
        """Publish the counts, and records that could not be published before; return whether all
        are stored.
        """
        if not self._unsent:
            self._unsent = self._cut()
        records = self._unsent
        stored = await asyncio.gather(*map(self._publish, records))
        self._unsent = [
            one for one, is_stored in zip(records, stored, strict=True) if not is_stored
        ]
        return not self._unsent

    async def close(self, timeout_s: float) -> None:
        await self._tasks.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while await self.flush() and self._tallies:
                    pass
        if self.num_waiting:
            _log.warning("refusals were not recorded", extra={"num_records": self.num_waiting})

    def _cut(self) -> list[RefusalRecord]:
        tallies, self._tallies = self._tallies, {}
        self._num_kinds_of.clear()
        recorded_ns = self._clock.now_ns()
        return [
            RefusalRecord(
                gateway_id=self._gateway_id,
                number=number,
                recorded_ns=recorded_ns,
                tenant=kind.tenant,
                key_id=kind.key_id,
                door=kind.door,
                status=kind.status,
                code=kind.code,
                limit=kind.limit,
                count=tally.count,
                first_ns=tally.first_ns,
                last_ns=tally.last_ns,
                request_id=tally.request_ids[0] if tally.request_ids else "",
                request_ids=tuple(tally.request_ids),
            )
            for number, (kind, tally) in enumerate(tallies.items())
        ]

    async def _publish(self, record: RefusalRecord) -> bool:
        try:
            await self._outbox.publish(record, _LINGER_S)
        except (MillraceError, TimeoutError):
            return False
        return True
