"""Measurements of a model's jobs: arrival rates, output lengths, throughput."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import NamedTuple

from millrace.scheduler.jobs.scheduled_job import ScheduledJob, Tenant

_ARRIVALS_WINDOW_S = 20.0
_LEAST_WINDOW_S = 1.0
# Arrivals remembered of a tenant: this many in less time give the rate as well.
_MAX_TIMES = 256
_MAX_TENANTS = 1_024
_NEWEST_SIZE_WEIGHT = 1 / 16


class JobSize(NamedTuple):
    """Expected size of a job. ``tokens`` is the service charged to its tenant."""

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


class ArrivalRates:
    """Arrival rate and mean size of jobs by tenant. Pure: the caller passes the time."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._tenants: OrderedDict[Tenant, _Asked] = OrderedDict()

    def note(self, scheduled: ScheduledJob, now_s: float) -> None:
        """Record the arrival of a prepared job."""
        tenant, size = scheduled.tenant, size_of(scheduled)
        asked = self._tenants.get(tenant)
        if asked is None:
            asked = self._tenants[tenant] = _Asked(size)
            if len(self._tenants) > _MAX_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
            pairs = zip(asked.size, size, strict=True)
            asked.size = JobSize(*(old + _NEWEST_SIZE_WEIGHT * (new - old) for old, new in pairs))
        asked.times_s.append(now_s)

    def size_of(self, tenant: Tenant) -> JobSize | None:
        """Return the mean size of a tenant's jobs; None if unknown."""
        asked = self._tenants.get(tenant)
        return None if asked is None else asked.size

    def rates(self, now_s: float) -> dict[Tenant, float]:
        """Return the jobs per second of each tenant with recent arrivals."""
        found: dict[Tenant, float] = {}
        oldest_s = now_s - _ARRIVALS_WINDOW_S
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
            found[tenant] = len(times_s) / max(now_s - since_s, _LEAST_WINDOW_S)
        return found


# Lower bound of the newest answer's weight, so about the last 64 answers are remembered.
_NEWEST_WEIGHT = 1 / 64
# Weight of the prior, in answers.
_PRIOR_ANSWERS = 4.0
# Growth factor of the length buckets.
_BUCKET_FACTOR = 1.5
_NUM_BUCKETS = 32
_NUM_SHARES = 8
_LOG_FACTOR = math.log(_BUCKET_FACTOR)


class OutputLengths:
    """Running estimates of one model's output lengths, by tenant.

    The mean of all tenants is the prior of a tenant, and ``prior_tokens`` is the prior of that
    mean. Beyond ``max_tenants``, the least recently seen tenant is forgotten. O(1) an answer.
    """

    def __init__(self, prior_tokens: float = 128.0, max_tenants: int = 4_096) -> None:
        self._max_tenants = max_tenants
        self._prior_tokens = prior_tokens
        self._all = _SpreadLengths()
        self._tenants: OrderedDict[str, _Lengths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def observe(self, tenant: str, completion_tokens: int) -> None:
        """Record the length of a completion that has ended."""
        lengths = self._tenants.get(tenant)
        if lengths is None:
            lengths = self._tenants[tenant] = _Lengths()
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(tenant)
        lengths.add(completion_tokens)
        self._all.add(completion_tokens)

    def expected_output(self, tenant: str, max_tokens: int) -> float:
        """Return the expected tokens of a completion: at least 1, at most ``max_tokens``."""
        of_all = self._all.mean(self._prior_tokens)
        lengths = self._tenants.get(tenant)
        expected = of_all if lengths is None else lengths.mean(of_all)
        return min(max(expected, 1.0), max(max_tokens, 0))

    def spread(self) -> tuple[float, ...]:
        """Return the lengths of all tenants at evenly spaced quantiles, divided by their mean.

        All are 1 if the lengths are equal or little is known.
        """
        if self._all.num_answers < _PRIOR_ANSWERS:
            return (1.0,) * _NUM_SHARES
        found = [self._all.quantile((n + 0.5) / _NUM_SHARES) for n in range(_NUM_SHARES)]
        mean = sum(found) / _NUM_SHARES
        return tuple(length / mean for length in found)


class _Lengths:
    """Exponentially weighted mean of lengths."""

    __slots__ = ("_mean", "num_answers")

    def __init__(self) -> None:
        self.num_answers = 0
        self._mean = 0.0

    def add(self, num_tokens: int) -> float:
        """Add a length and return its weight."""
        self.num_answers += 1
        weight = max(1 / self.num_answers, _NEWEST_WEIGHT)
        self._mean += weight * (num_tokens - self._mean)
        return weight

    def mean(self, prior: float) -> float:
        known = min(self.num_answers, 1 / _NEWEST_WEIGHT)
        return (known * self._mean + _PRIOR_ANSWERS * prior) / (known + _PRIOR_ANSWERS)


class _SpreadLengths(_Lengths):
    """Exponentially weighted mean and histogram of lengths."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, float] = {}

    def add(self, num_tokens: int) -> float:
        weight = super().add(num_tokens)
        counts = self._counts
        for bucket in counts:
            counts[bucket] *= 1 - weight
        bucket = min(int(math.log(max(num_tokens, 1)) / _LOG_FACTOR), _NUM_BUCKETS - 1)
        counts[bucket] = counts.get(bucket, 0.0) + weight
        return weight

    def quantile(self, share: float) -> float:
        """Return the length that this share of answers does not exceed, within the factor 1.5."""
        left = share
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 1e-9:
                return _BUCKET_FACTOR ** (bucket + 1)
        return _BUCKET_FACTOR ** (max(self._counts) + 1)


WINDOW_S = 10.0
_BUCKET_S = 0.25
_MIN_RETRY_S = 0.5
_MAX_RETRY_S = 60.0
_RETRY_UNKNOWN_S = 5.0


class Throughput:
    """Requests ended by all workers of a model in the last seconds.

    Pure: the caller passes the time.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, num_ended: int, now_s: float) -> None:
        start_s = now_s - now_s % _BUCKET_S
        if self._buckets and self._buckets[-1][0] == start_s:
            num_ended_before = self._buckets.pop()[1]
            self._buckets.append((start_s, num_ended_before + num_ended))
        else:
            self._buckets.append((start_s, num_ended))
        self._total += num_ended
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - WINDOW_S:
            self._total -= self._buckets.popleft()[1]

    def per_s(self, now_s: float) -> float:
        """Return the requests ended per second; 0 if none ended recently."""
        self._forget(now_s)
        if not self._buckets:
            return 0.0
        since_s = max(now_s - self._buckets[0][0], _BUCKET_S)
        return self._total / since_s


def eta_s(num_ahead: float, per_s: float) -> float | None:
    """Return the seconds until ``num_ahead`` requests are done; None if unknown."""
    if num_ahead <= 0:
        return 0.0
    return num_ahead / per_s if per_s > 0 else None


def retry_after_s(num_queued: int, bound: int, per_s: float) -> float:
    """Return the seconds until the queue is at three quarters of its bound."""
    wait_s = eta_s(num_queued - bound * 3 // 4, per_s)
    if wait_s is None:
        return _RETRY_UNKNOWN_S
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
