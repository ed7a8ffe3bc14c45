"""Reports to the schedulers of the prefixes in this worker's cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice

from millrace.bus.api import Bus
from millrace.engine.types import PrefixChanges
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import wait_or_sleep
from millrace.schemas.config import WorkerConfig
from millrace.schemas.control import PrefixReport
from millrace.schemas.errors import MillraceError
from millrace.schemas.prefix import REPORTED_BYTES

# Part of a message that is not keys.
_HEAD_BYTES = 1_024

logger = logging.getLogger(__name__)


class PrefixReporter:
    """Reporter of prefix cache changes: changes every ``prefix_report_s``, the whole every
    ``prefix_whole_s``.

    If ``prefix_report_s`` is 0, it reports nothing. Reported keys are the most recently used ones,
    at most ``max_reported_prefixes`` and at most as many as fit a message. A key that is displaced
    counts as removed.
    """

    def __init__(
        self, bus: Bus, config: WorkerConfig, worker_id: str, model: str, clock: Clock
    ) -> None:
        self._workers = bus.workers
        self._config = config
        self._worker_id = worker_id
        self._model = model
        self._clock = clock
        fitting = max(1, (bus.max_payload_bytes - _HEAD_BYTES) // REPORTED_BYTES)
        self._max_keys = min(config.max_reported_prefixes, fitting)
        self._keys: dict[bytes, None] = {}  # least recently used first
        self._changed: dict[bytes, bool] = {}  # key: is it cached; since the last report
        self._number = 0
        self._whole_wanted = True
        self._wanted = asyncio.Event()

    def note(self, changes: PrefixChanges) -> None:
        """Add the changes that an engine reported."""
        if self._config.prefix_report_s <= 0:
            return
        keys, changed = self._keys, self._changed
        if changes.whole:
            keys.clear()
            self.report_whole()
        for key in _split(changes.added):
            if key in keys:
                del keys[key]
            else:
                changed[key] = True
            keys[key] = None
        self._wanted.set()
        for key in _split(changes.removed):
            if key in keys:
                del keys[key]
                changed[key] = False
        num_over = len(keys) - self._max_keys
        if num_over > 0:
            for key in list(islice(keys, num_over)):
                del keys[key]
                changed[key] = False

    def report_whole(self) -> None:
        """Make the next report a whole one: schedulers may have missed a report."""
        self._whole_wanted = True
        self._wanted.set()

    async def run(self) -> None:
        """Send reports until cancelled."""
        if self._config.prefix_report_s <= 0:
            return
        whole_s = float("-inf")
        while True:
            now_s = self._clock.monotonic()
            if now_s - whole_s >= self._config.prefix_whole_s:
                self._whole_wanted = True
            if 0 < len(self._changed) <= len(self._keys):
                await self._send(self._step())
            if self._whole_wanted or len(self._changed) > len(self._keys):
                # For schedulers that got every change, this repeats known facts and is quick to
                # read.
                whole_s = now_s
                await self._send(self._whole())
            await self._clock.sleep(self._config.prefix_report_s)
            if not self._whole_wanted:
                until_whole_s = whole_s + self._config.prefix_whole_s - self._clock.monotonic()
                await wait_or_sleep(self._wanted, self._clock, max(until_whole_s, 0.0))
            self._wanted.clear()

    def _whole(self) -> PrefixReport:
        self._whole_wanted = False
        self._changed.clear()
        return self._report(added=reversed(self._keys), whole=True)

    def _step(self) -> PrefixReport:
        changed, self._changed = self._changed, {}
        return self._report(
            added=(key for key, is_there in changed.items() if is_there),
            removed=(key for key, is_there in changed.items() if not is_there),
        )

    def _report(
        self, added: Iterable[bytes], removed: Iterable[bytes] = (), *, whole: bool = False
    ) -> PrefixReport:
        self._number += 1
        return PrefixReport(
            worker_id=self._worker_id,
            model=self._model,
            number=self._number,
            whole=whole,
            added=b"".join(added),
            removed=b"".join(removed),
        )

    async def _send(self, report: PrefixReport) -> None:
        try:
            await self._workers.report_prefixes(report)
        except MillraceError as error:
            logger.warning("prefixes could not be reported", extra={"code": error.code})
            self._whole_wanted = True


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + REPORTED_BYTES] for i in range(0, len(keys), REPORTED_BYTES)]
