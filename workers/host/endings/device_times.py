"""What requests took of the worker's device, and when that is known for good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from workers.engine.types import DeviceTime, EngineOutput
from workers.host.endings.records import attempt_of
from workers.host.generations.generation import Generation

# An engine that has not said the last of a request by then is not waited for: it is in a step that
# takes this long, and may never come out of it.
PATIENCE_S = 5.0

logger = logging.getLogger(__name__)


class _Owed:
    """Of one generation, the last of its device time is still to be told; ``then`` is done when it
    is."""

    __slots__ = ("generation", "then", "timer")

    def __init__(self, generation: Generation, timer: asyncio.TimerHandle) -> None:
        self.generation = generation
        self.timer = timer
        self.then: list[Callable[[], None]] = []


class DeviceTimes:
    """Takes what engines tell to the generations.

    The last output of most says all. One that was cancelled, or that owed something in its last
    output, is told of later, in a step or two; whoever wants all of it waits ``when_told``. It is
    told for good when the engine has ended, or has said nothing for ``PATIENCE_S``.
    """

    def __init__(self) -> None:
        self._owed: dict[str, _Owed] = {}

    def __len__(self) -> int:
        return len(self._owed)

    def owe(self, generation: Generation) -> None:
        """The engine will say the last of it."""
        engine_id = generation.engine_id
        if engine_id not in self._owed:
            timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, engine_id)
            self._owed[engine_id] = _Owed(generation, timer)

    def note(self, times: Iterable[DeviceTime], running: dict[str, Generation]) -> None:
        """What the engine said; ``running`` are the generations that it goes on with, by id."""
        for time in times:
            owed = self._owed.get(time.request_id)
            if owed is not None:
                owed.generation.device_use.note(time.device_us)
                if time.over:
                    self._told(time.request_id)
            elif time.request_id in running:
                running[time.request_id].device_use.note(time.device_us)

    def note_late(self, output: EngineOutput) -> None:
        """An output of one that was cancelled meanwhile."""
        owed = self._owed.get(output.request_id)
        if owed is not None:
            owed.generation.device_use.note(output.device_us)

    def note_engine_lost(self, running: Iterable[Generation]) -> None:
        """The engine has ended: of ``running`` and of all that owe, no more will be known of it."""
        for generation in running:
            generation.device_use.note_engine_lost()
        for engine_id in list(self._owed):
            self._told(engine_id)

    def when_told(self, generation: Generation, then: Callable[[], None]) -> None:
        """Do ``then`` once all is told, at once if it is."""
        owed = self._owed.get(generation.engine_id)
        if owed is None or owed.generation is not generation:
            then()
        else:
            owed.then.append(then)

    def go_on(self, former: Generation, to: Generation, worker_id: str, at_ns: int) -> None:
        """A run of the same request goes on here from another: have it know what that one took."""
        to.lives = former.lives | to.lives

        def note() -> None:
            if former.started_ns:
                to.lives[former.epoch] = attempt_of(former, worker_id, former.done_ns or at_ns)

        self.when_told(former, note)

    async def told(self, generation: Generation) -> None:
        """Returns when all is told."""
        done = asyncio.Event()
        self.when_told(generation, done.set)
        await done.wait()

    async def all_told(self, timeout_s: float) -> None:
        """Returns when nothing is owed, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                for owed in list(self._owed.values()):
                    await self.told(owed.generation)
        except TimeoutError:
            logger.warning("the engine did not say what requests took", extra={"num": len(self)})

    def _give_up(self, engine_id: str) -> None:
        logger.warning(
            "the engine did not say what a request took",
            extra={"request_id": self._owed[engine_id].generation.request_id},
        )
        self._told(engine_id)

    def _told(self, engine_id: str) -> None:
        owed = self._owed.pop(engine_id)
        owed.timer.cancel()
        for then in owed.then:
            then()
