"""Log of refused and failed requests: one line for each."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

from millrace.gateway.errors import Refusal
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks

_log = logging.getLogger(__name__)

INTERVAL_S = 10.0
LINES_OF_A_KIND = 20
MAX_KINDS = 256
_FIRST_SERVER_ERROR = 500


class _Kind(NamedTuple):
    """Failures that share a bound on log lines. It contains no text of clients."""

    what: str
    tenant: str
    path: str
    status: int
    code: str

    def write(self, message: str, **more: str | int) -> None:
        level = logging.WARNING if self.status >= _FIRST_SERVER_ERROR else logging.INFO
        told = {
            "tenant": self.tenant,
            "path": self.path,
            "status": self.status,
            "code": self.code,
        }
        _log.log(level, message, extra={**more, **told})


_REFUSED = "a request was refused"
_FAILED = "a request failed"
_OTHERS = _Kind("others", "", "others", 0, "")


class FailureLog:
    """Rate-limited log of failures. Each kind (tenant, path, status and code) has
    ``LINES_OF_A_KIND`` lines per interval of ``INTERVAL_S``, and one more at its end with the
    number of omitted lines. Beyond ``MAX_KINDS`` kinds in an interval, all others share one
    omission count.

    A status of 500 or more is a warning. Owns its task: ``start`` starts it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Counter[_Kind] = Counter()
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.repeat(self._end_interval, INTERVAL_S, self._clock, "failure log")

    async def close(self) -> None:
        await self._tasks.close()
        self.flush()

    def refused(self, path: str, refusal: Refusal, tenant: str, request_id: str) -> None:
        """Log a request that was never accepted."""
        self._note(_Kind(_REFUSED, tenant, path, refusal.status, refusal.code), request_id)

    def failed(self, path: str, refusal: Refusal, tenant: str, request_id: str) -> None:
        """Log an accepted request that did not end well."""
        self._note(_Kind(_FAILED, tenant, path, refusal.status, refusal.code), request_id)

    def flush(self) -> None:
        """End the interval: log the number of omitted lines."""
        counts, self._counts = self._counts, Counter()
        for kind, count in counts.items():
            num_written = 0 if kind is _OTHERS else LINES_OF_A_KIND
            if count > num_written:
                kind.write(
                    "more requests were refused or failed than are in the log",
                    num_left_out=count - num_written,
                )

    async def _end_interval(self) -> None:
        self.flush()

    def _note(self, kind: _Kind, request_id: str) -> None:
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = _OTHERS
        self._counts[kind] += 1
        if kind is not _OTHERS and self._counts[kind] <= LINES_OF_A_KIND:
            kind.write(kind.what, request_id=request_id)
