"""Retries with exponential backoff."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from millrace.schemas.errors import MillraceError

T = TypeVar("T")


def doubling_delays(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the pauses between attempts in seconds: each twice the one before, up to
    ``longest_s``."""
    delay_s = first_s
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, longest_s)


def is_retryable(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    return isinstance(error, MillraceError) and error.retryable


async def retry(
    step: Callable[[], Awaitable[T]],
    delays: Iterable[float],
    sleep: Callable[[float], Awaitable[None]],
    *,
    retried: Callable[[Exception], bool] = is_retryable,
    on_failure: Callable[[Exception, float], None] | None = None,
) -> T:
    """Call ``step`` until it succeeds, with a retry after each of ``delays``.

    Args:
        step: The call.
        delays: Pauses in seconds. The last error is raised when they are used up.
        sleep: Sleeps for a pause.
        retried: Returns whether an error is retried. Others are raised.
        on_failure: Called with each retried error and the pause after it.

    Returns:
        The result of ``step``.
    """
    for delay_s in delays:
        try:
            return await step()
        except Exception as error:
            if not retried(error):
                raise
            if on_failure is not None:
                on_failure(error, delay_s)
        await sleep(delay_s)
    return await step()
