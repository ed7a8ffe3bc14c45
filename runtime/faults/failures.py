"""Failures of a process's long-lived tasks: logged, counted, and bounded.

A process with too many failures gives up.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.retry import doubling_delays
from millrace.schemas.errors import BusUnavailableError, MillraceError

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
WINDOW_S = 60.0
_FIRST_DELAY_S = 0.2
_MOST_DELAY_S = 5.0
_CALM_S = 30.0


class PartFailedError(MillraceError, code="part_failed"):
    """Repeated failures of this process's tasks with unforeseen errors."""


class Failures(Collector):
    """Counter of failures of long-lived tasks.

    MillraceError and OSError (connections) are foreseen: they are logged as warnings. Other errors
    are logged with their traceback. After ``MAX_FAILURES`` of them within ``WINDOW_S`` seconds the
    process is in ``trouble`` for good, and ``on_giving_up`` is called to drain it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._unforeseen_s: deque[float] = deque(maxlen=MAX_FAILURES)
        self.on_giving_up: Callable[[], None] = _nothing
        self.trouble = ""

    def note(self, task: str, error: Exception, foreseen: tuple[type[Exception], ...] = ()) -> None:
        """Record a task's failure.

        ``foreseen`` are further foreseen types. A group of errors is foreseen if all its errors
        are.
        """
        causes = list(_causes(error))
        is_foreseen = all(isinstance(one, (MillraceError, OSError, *foreseen)) for one in causes)
        self._counts[task, "foreseen" if is_foreseen else "unforeseen"] += 1
        if is_foreseen:
            cause = "; ".join(f"{type(one).__name__}: {one}" for one in causes)
            logger.warning("a task failed", extra={"task": task, "cause": cause})
            return
        logger.error("a task failed", extra={"task": task}, exc_info=error)
        self._unforeseen_s.append(self._clock.monotonic())
        if self.trouble or len(self._unforeseen_s) < MAX_FAILURES:
            return
        if self._unforeseen_s[-1] - self._unforeseen_s[0] <= WINDOW_S:
            self.trouble = (
                f"tasks failed {MAX_FAILURES} times within {WINDOW_S:g} s, the last one: {task}"
            )
            logger.critical("this process gives up", extra={"cause": self.trouble})
            self.on_giving_up()

    def check(self) -> None:
        """Raise PartFailedError if the process gave up."""
        if self.trouble:
            raise PartFailedError(f"This process gave up: {self.trouble}. Its log has the causes.")

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "millrace_task_failures",
            "Failures of long-lived tasks, each of which was started again",
            labels=["task", "kind"],
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


def _causes(error: Exception) -> Iterator[Exception]:
    """Yield the errors of a group, or the error itself."""
    if isinstance(error, ExceptionGroup):
        for one in error.exceptions:
            yield from _causes(one)
    else:
        yield error


def _nothing() -> None:
    return


_of_process: ContextVar[Failures] = ContextVar("failures", default=Failures())  # noqa: B039


def failures() -> Failures:
    """Return the failures of the part to which the running task belongs."""
    return _of_process.get()


def note_in(noted: Failures) -> None:
    """Record failures of this task, and of tasks that it starts from now on, in ``noted``."""
    _of_process.set(noted)


async def keep_running(
    name: str,
    run: Callable[[], Awaitable[None]],
    clock: Clock,
    foreseen: tuple[type[Exception], ...] = (),
    is_final: Callable[[Exception], bool] = lambda _: False,
) -> None:
    """Run a task until it returns.

    A failure is recorded (``Failures.note``), and the task starts again with exponential backoff.
    Cancelling ends it. An error that ``is_final`` is raised.
    """
    delays = doubling_delays(_FIRST_DELAY_S, _MOST_DELAY_S)
    while True:
        started_s = clock.monotonic()
        try:
            await run()
        except Exception as error:
            if is_final(error):
                raise
            failures().note(name, error, foreseen)
            if clock.monotonic() - started_s > _CALM_S:
                delays = doubling_delays(_FIRST_DELAY_S, _MOST_DELAY_S)
            await clock.sleep(next(delays))
        else:
            return


async def keep_part_running(
    name: str, live: Callable[[Callable[[], None]], Awaitable[None]], clock: Clock
) -> None:
    """Run a part until it returns. A part that fails runs again with new state.

    ``live`` calls its argument once it serves. Errors before that are raised, and later every
    MillraceError except BusUnavailableError.
    """
    has_served = False

    def note_served() -> None:
        nonlocal has_served
        has_served = True

    def is_final(error: Exception) -> bool:
        is_ours = isinstance(error, MillraceError) and not isinstance(error, BusUnavailableError)
        return is_ours or not has_served

    await keep_running(name, lambda: live(note_served), clock, is_final=is_final)
