"""Device times of requests, and when they are final."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from millrace.engine.types import DeviceTime, EngineOutput
from millrace.workers.host.endings.records import attempt_of
from millrace.workers.host.generations.generation import Generation

# Maximum wait for the final device time of a request. An engine that is silent longer is in a long
# step, and may never come out of it.
PATIENCE_S = 5.0

logger = logging.getLogger(__name__)


class _Expected:
    """Generation whose final device time is not reported yet; ``then`` are the callbacks for that
    time.
    """

    __slots__ = ("generation", "then", "timer")

    def __init__(self, generation: Generation, timer: asyncio.TimerHandle) -> None:
        self.generation = generation
        self.timer = timer
        self.then: list[Callable[[], None]] = []


class DeviceTimes:
    """Device times that engines report, added to their generations.

    The last output of most generations reports all of it. After a cancel, or if the last output
    ``owes`` device time, the report follows in a step or two; ``when_reported`` waits for it. The
    time is also final when the engine has ended, or has reported nothing for ``PATIENCE_S``.
    """

    def __init__(self) -> None:
        self._expected: dict[str, _Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect_report(self, generation: Generation) -> None:
        """Expect the engine's report of a generation's final device time."""
        engine_id = generation.engine_id
        if engine_id not in self._expected:
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, engine_id)
            self._expected[engine_id] = _Expected(generation, timer)

    def note(self, times: Iterable[DeviceTime], running: dict[str, Generation]) -> None:
        """Add the engine's reports; ``running`` are the generations that it still runs, by engine
        id.
        """
        for time in times:
            expected = self._expected.get(time.request_id)
            if expected is not None:
                expected.generation.accounting.device_use.note(time.device_us)
                if time.over:
                    self._settle(time.request_id)
            elif time.request_id in running:
                running[time.request_id].accounting.device_use.note(time.device_us)

    def note_late(self, output: EngineOutput) -> None:
        """Add the device time of an output whose generation was cancelled meanwhile."""
        expected = self._expected.get(output.request_id)
        if expected is not None:
            expected.generation.accounting.device_use.note(output.device_us)

    def note_engine_lost(self, running: Iterable[Generation]) -> None:
        """Treat the device times of ``running`` and of expected reports as final: the engine has
        ended.
        """
        for generation in running:
            generation.accounting.device_use.note_engine_lost()
        for engine_id in list(self._expected):
            self._settle(engine_id)

    def when_reported(self, generation: Generation, then: Callable[[], None]) -> None:
        """Call ``then`` once the generation's device time is final; at once if it is already."""
        expected = self._expected.get(generation.engine_id)
        if expected is None or expected.generation is not generation:
            then()
        else:
            expected.then.append(then)

    def carry_over(self, former: Generation, to: Generation, worker_id: str, at_ns: int) -> None:
        """Give ``to``, which continues ``former`` on this worker, the device time of ``former``."""
        to.attempts = former.attempts | to.attempts

        def note() -> None:
            if former.timing.started_ns or former.accounting.device_use.total_us:
                to.attempts[former.epoch] = attempt_of(
                    former, worker_id, former.timing.done_ns or at_ns
                )

        self.when_reported(former, note)

    async def wait_reported(self, generation: Generation) -> None:
        """Wait until the generation's device time is final."""
        done = asyncio.Event()
        self.when_reported(generation, done.set)
        await done.wait()

    async def wait_all_reported(self, timeout_s: float) -> None:
        """Wait until no report is expected, for ``timeout_s`` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                for expected in list(self._expected.values()):
                    await self.wait_reported(expected.generation)
        except TimeoutError:
            logger.warning("the engine did not report device times", extra={"num": len(self)})

    def _give_up(self, engine_id: str) -> None:
        logger.warning(
            "the engine did not report a device time",
            extra={"request_id": self._expected[engine_id].generation.request_id},
        )
        self._settle(engine_id)

    def _settle(self, engine_id: str) -> None:
        expected = self._expected.pop(engine_id)
        expected.timer.cancel()
        for then in expected.then:
            then()
