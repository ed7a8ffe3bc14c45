"""Who asks a model for how much, of late."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from millrace.scheduler.jobs.scheduled_job import ScheduledJob, Tenant

_WINDOW_S = 20.0
_LEAST_S = 1.0
# Arrivals of a tenant that are remembered: as many in less time give the rate as well.
_MAX_TIMES = 256
_MAX_TENANTS = 1_024
_NEWEST_WEIGHT = 1 / 16


class JobSize(NamedTuple):
    """What is expected of a job: ``tokens`` are the service that its tenant is charged for."""

    prompt_tokens: float
    output_tokens: float
    tokens: float


def size_of(scheduled: ScheduledJob) -> JobSize:
    return JobSize(
        scheduled.resources.num_context_tokens,
        scheduled.service.output_tokens,
        scheduled.service.tokens,
    )


class _Asked:
    __slots__ = ("size", "times_s")

    def __init__(self, size: JobSize) -> None:
        self.size = size
        self.times_s: deque[float] = deque(maxlen=_MAX_TIMES)


class Arrivals:
    """Jobs by tenant: how many a second, and how large. Pure: the time is passed in."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._tenants: OrderedDict[Tenant, _Asked] = OrderedDict()

    def note(self, scheduled: ScheduledJob, now_s: float) -> None:
        """A job has come, and is prepared."""
        tenant, size = scheduled.tenant, size_of(scheduled)
        asked = self._tenants.get(tenant)
        if asked is None:
            asked = self._tenants[tenant] = _Asked(size)
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
            pairs = zip(asked.size, size, strict=True)
            asked.size = JobSize(*(old + _NEWEST_WEIGHT * (new - old) for old, new in pairs))
        asked.times_s.append(now_s)

    def size_of(self, tenant: Tenant) -> JobSize | None:
        """What its jobs are like; None: none is known."""
        asked = self._tenants.get(tenant)
        return None if asked is None else asked.size

    def rates(self, now_s: float) -> dict[Tenant, float]:
        """Jobs a second of all that asked lately."""
        found: dict[Tenant, float] = {}
        oldest_s = now_s - _WINDOW_S
        for tenant, asked in list(self._tenants.items()):
            times_s = asked.times_s
            is_cut = len(times_s) == _MAX_TIMES
            while times_s and times_s[0] <= oldest_s:
                times_s.popleft()
                is_cut = False
            if not times_s:
                del self._tenants[tenant]
                continue
            since_s = times_s[0] if is_cut else max(oldest_s, self._begun_s)
            found[tenant] = len(times_s) / max(now_s - since_s, _LEAST_S)
        return found
