"""Parts of one process, each started again when it fails."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from millrace.runtime.clock import Clock
from millrace.runtime.retry import doubling_delays

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.2
_MOST_DELAY_S = 5.0
_CALM_S = 30.0


async def keep_running(name: str, run: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Run a part until it returns by itself. A failure is logged and the part starts again, after
    a delay that doubles while it keeps failing; cancelling ends it."""
    delays = doubling_delays(_FIRST_DELAY_S, _MOST_DELAY_S)
    while True:
        started_s = clock.monotonic()
        try:
            await run()
        except Exception as error:  # whatever it is, this part alone suffers
            if clock.monotonic() - started_s > _CALM_S:
                delays = doubling_delays(_FIRST_DELAY_S, _MOST_DELAY_S)
            delay_s = next(delays)
            logger.warning(
                "%s failed; starting it again",
                name,
                extra={"delay_s": delay_s, "reason": f"{type(error).__name__}: {error}"},
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            await clock.sleep(delay_s)
        else:
            return
