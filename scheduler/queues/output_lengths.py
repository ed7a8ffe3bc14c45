"""How long the answers of a model's tenants are, of late."""

from __future__ import annotations

import math
from collections import OrderedDict

# An answer's weight is at least this, so about as many of the last ones are remembered.
_NEWEST_WEIGHT = 1 / 64
# What is known beforehand counts as so many answers.
_PRIOR_ANSWERS = 4.0
# Lengths are counted in buckets that grow by this factor.
_BUCKET_FACTOR = 1.5
_NUM_BUCKETS = 32
_NUM_SHARES = 8
_LOG_FACTOR = math.log(_BUCKET_FACTOR)


class OutputLengths:
    """Running estimates of the length of completions, by tenant, of one model.

    A tenant of whom little is known is taken to be like all others, and these to be like
    ``prior_tokens`` until there are answers. Of more than ``max_tenants``, the one that was not
    heard of for longest is forgotten. O(1) an answer.
    """

    def __init__(self, prior_tokens: float = 128.0, max_tenants: int = 4_096) -> None:
        self._max_tenants = max_tenants
        self._prior_tokens = prior_tokens
        self._all = _SpreadLengths()
        self._tenants: OrderedDict[str, _Lengths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def observe(self, tenant: str, completion_tokens: int) -> None:
        """A completion of this tenant has ended with so many tokens."""
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
        """Tokens that a completion will have which may have ``max_tokens``; at least 1, or 0 where
        none may come."""
        of_all = self._all.mean(self._prior_tokens)
        lengths = self._tenants.get(tenant)
        expected = of_all if lengths is None else lengths.mean(of_all)
        return min(max(expected, 1.0), max(max_tokens, 0))

    def spread(self) -> tuple[float, ...]:
        """Of all tenants together, lengths over their mean at evenly spaced shares: all 1 if they
        are alike, or little is known."""
        if self._all.num_answers < _PRIOR_ANSWERS:
            return (1.0,) * _NUM_SHARES
        found = [self._all.quantile((n + 0.5) / _NUM_SHARES) for n in range(_NUM_SHARES)]
        mean = sum(found) / _NUM_SHARES
        return tuple(length / mean for length in found)


class _Lengths:
    """A fading mean of lengths."""

    __slots__ = ("_mean", "num_answers")

    def __init__(self) -> None:
        self.num_answers = 0
        self._mean = 0.0

    def add(self, num_tokens: int) -> float:
        """The weight that the newest one has."""
        self.num_answers += 1
        weight = max(1 / self.num_answers, _NEWEST_WEIGHT)
        self._mean += weight * (num_tokens - self._mean)
        return weight

    def mean(self, prior: float) -> float:
        known = min(self.num_answers, 1 / _NEWEST_WEIGHT)
        return (known * self._mean + _PRIOR_ANSWERS * prior) / (known + _PRIOR_ANSWERS)


class _SpreadLengths(_Lengths):
    """With a fading histogram."""

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
        """The length that so large a share does not pass, within the factor 1.5."""
        left = share
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 1e-9:
                return _BUCKET_FACTOR ** (bucket + 1)
        return _BUCKET_FACTOR ** (max(self._counts) + 1)
