"""Event loop in virtual time: when idle, its clock jumps to the next timer.

Whole systems on the in-memory bus run in it, hours of virtual time in seconds. The same program
gives the same result each time: one thread, no system clock, no sockets.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_NS_PER_S = 1_000_000_000
START_NS = 1_700_000_000 * _NS_PER_S


class StandstillError(RuntimeError):
    """Standstill: every task waits and no timer is set."""


class _NeverWaits(selectors.SelectSelector):
    """Selector that advances the loop's clock in place of waiting for files, which are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandstillError("everything waits, and no timer is set that could wake it")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop in virtual time.

    ``time()`` starts at 0. Work for threads runs at once in the loop.

    ``run_until_complete`` raises StandstillError when nothing can happen any more.
    """

    def __init__(self) -> None:
        self._virtual = _NeverWaits()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s

    def run_in_executor(
        self,
        executor: Any,  # noqa: ARG002  # there are no threads to choose
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run ``func`` now. Virtual time stands still meanwhile, as during all work."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # the awaiting task gets it
            future.set_exception(error)
        return future


class VirtualClock:
    """Clock on a VirtualTimeLoop (see ``runtime.clock.Clock``) that starts at ``start_ns`` of
    UTC."""

    def __init__(self, loop: VirtualTimeLoop, start_ns: int = START_NS) -> None:
        self._loop = loop
        self._start_ns = start_ns

    def now_ns(self) -> int:
        return self._start_ns + round(self._loop.time() * _NS_PER_S)

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run ``main`` on a new loop and clock and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(VirtualClock(loop)))
