"""Who has been served least: virtual token counters.

Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from scheduler.queues.lazy_min import LazyMin

Member = TypeVar("Member", bound=Hashable)

_MAX_IDLE = 10_000


class VirtualTokens(Generic[Member]):
    """A counter of tokens served for each member; those who want more are served least first.

    Whoever begins to want is lifted to the least of those who want already, or to where the last
    one stopped when nobody wanted: having asked for nothing is no claim. So two members who both
    want all the time are never further apart than the cost of what each has in service. Members
    who want nothing are remembered, up to ``max_idle``, so that a debt is not lost by a pause.
    Nobody falls below where it was lifted to, whatever of the time before turns out to be less.
    """

    def __init__(self, max_idle: int = _MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._wanting: LazyMin[Member] = LazyMin()
        self._floors: dict[Member, float] = {}
        self._idle: OrderedDict[Member, float] = OrderedDict()
        self._last_stop = 0.0

    def begin(self, member: Member) -> None:
        """It wants to be served from now on."""
        if member in self._wanting:
            return
        least = self._wanting.least()
        floor = self._last_stop if least is None else self._wanting.value(least)
        self._floors[member] = floor
        self._wanting.set(member, max(self._idle.pop(member, floor), floor))

    def end(self, member: Member) -> None:
        """It wants nothing just now."""
        if member not in self._wanting:
            return
        counter = self._wanting.value(member)
        self._wanting.discard(member)
        del self._floors[member]
        if not len(self._wanting):
            self._last_stop = max(self._last_stop, counter)
        self._set_idle(member, counter)

    def charge(self, member: Member, tokens: float) -> None:
        """It was served, or with less than nothing was charged too much."""
        if member in self._wanting:
            counter = self._wanting.value(member) + tokens
            self._wanting.set(member, max(counter, self._floors[member]))
        else:
            self._set_idle(member, self._idle.pop(member, self._floor()) + tokens)

    def counter(self, member: Member) -> float:
        if member in self._wanting:
            return self._wanting.value(member)
        return self._idle.get(member, self._floor())

    def floored_counter(self, member: Member) -> float:
        """Where it stands among those who want, or would if it began to want now."""
        return max(self.counter(member), self._floor())

    def spread(self) -> float:
        """How much more the one of those who want was served than another, at most."""
        values = [self._wanting.value(member) for member in self._wanting]
        return max(values) - min(values) if values else 0.0

    def _floor(self) -> float:
        least = self._wanting.least()
        return self._last_stop if least is None else self._wanting.value(least)

    def _set_idle(self, member: Member, counter: float) -> None:
        self._idle[member] = counter
        self._idle.move_to_end(member)
        if len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)
