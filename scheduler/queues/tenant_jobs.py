"""The order in which the jobs of one tenant are sent."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from millrace.scheduler.jobs.scheduled_job import ScheduledJob

# A tenant's first job goes at the latest when so many others of the tenant went before it.
MAX_OVERTAKING = 3

_Urgency = tuple[float, int]
_Entry = tuple[tuple[float, ...], int, ScheduledJob]


class _Line:
    """A heap of jobs, some of which may be gone; those that were met while they were passed over
    are set aside."""

    def __init__(self) -> None:
        self.heap: list[_Entry] = []
        self.aside: list[_Entry] = []

    def restore(self) -> None:
        for entry in self.aside:
            heapq.heappush(self.heap, entry)
        self.aside.clear()

    def clear(self) -> None:
        self.heap.clear()
        self.aside.clear()


class TenantJobs:
    """The jobs of one tenant in one tier that are here.

    The next one is, of those with the least ``priority``, the most urgent. The most urgent of all
    is overtaken no more than ``MAX_OVERTAKING`` times, so each job is sent, whatever comes behind
    it, after at most ``MAX_OVERTAKING + 1`` times as many of the tenant's jobs as without
    priorities. O(log n) for each change.
    """

    def __init__(self) -> None:
        self._by_priority = _Line()
        self._by_urgency = _Line()
        self._numbers = itertools.count()
        # What is left in a line under another number is no member any more.
        self._members: dict[ScheduledJob, int] = {}
        self._passed: set[ScheduledJob] = set()
        self._num_overtaking = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_ready(self) -> bool:
        """There is one that was not passed over."""
        return len(self._members) > len(self._passed)

    def push(self, scheduled: ScheduledJob, urgency: _Urgency) -> None:
        """Of two jobs of a priority the one of the lesser ``urgency`` goes first."""
        number = self._members[scheduled] = next(self._numbers)
        by_priority = (scheduled.job.priority, *urgency)
        heapq.heappush(self._by_priority.heap, (by_priority, number, scheduled))
        heapq.heappush(self._by_urgency.heap, (urgency, number, scheduled))

    def remove(self, scheduled: ScheduledJob) -> None:
        """It was sent, or is over."""
        if scheduled in self._passed:
            self._passed.remove(scheduled)
        elif scheduled is self._first(self._by_urgency):
            self._num_overtaking = 0
        else:
            self._num_overtaking += 1
        del self._members[scheduled]
        if not self._members:
            self._by_priority.clear()
            self._by_urgency.clear()

    def pass_over(self, scheduled: ScheduledJob) -> None:
        """Skip a job until ``restore``. It stays a member."""
        self._passed.add(scheduled)

    def restore(self) -> None:
        """Put those that were skipped back in their places."""
        self._passed.clear()
        self._by_priority.restore()
        self._by_urgency.restore()

    def head(self) -> ScheduledJob:
        """The next one. AssertionError unless one ``is_ready``."""
        is_due = self._num_overtaking >= MAX_OVERTAKING
        found = self._first(self._by_urgency if is_due else self._by_priority)
        assert found is not None, "no job is ready"
        return found

    def _first(self, line: _Line) -> ScheduledJob | None:
        while line.heap:
            _, number, scheduled = line.heap[0]
            if self._members.get(scheduled) != number:
                heapq.heappop(line.heap)
            elif scheduled in self._passed:
                line.aside.append(heapq.heappop(line.heap))
            else:
                return scheduled
        return None

    def in_order(self) -> list[ScheduledJob]:
        """All, in the order in which they would be sent if nothing else came."""
        by_urgency = self._sorted(self._by_urgency)
        by_priority = self._sorted(self._by_priority)
        if by_priority == by_urgency:
            return by_priority
        left, urgent = deque(by_priority), deque(by_urgency)
        found: dict[ScheduledJob, None] = {}
        num_overtaking = self._num_overtaking
        while len(found) < len(by_urgency):
            for line in (left, urgent):
                while line and line[0] in found:
                    line.popleft()
            chosen = urgent[0] if num_overtaking >= MAX_OVERTAKING else left[0]
            num_overtaking = 0 if chosen is urgent[0] else num_overtaking + 1
            found[chosen] = None
        return list(found)

    def _sorted(self, line: _Line) -> list[ScheduledJob]:
        found = [entry for entry in line.heap if self._members.get(entry[2]) == entry[1]]
        return [scheduled for _, _, scheduled in sorted(found)]
