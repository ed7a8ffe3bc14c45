"""Records of lost workers, from any part that sees a loss."""

from __future__ import annotations

import logging
import re

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock
from millrace.runtime.process import signal_name, was_out_of_memory
from millrace.runtime.retry import doubling_delays, is_retryable, retry
from millrace.schemas.errors import MillraceError
from millrace.schemas.records import LossCause, WorkerLossRecord

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_SIGNAL = re.compile(r"ended with signal (SIG[A-Z0-9]+|[0-9]+)")
_EXIT = re.compile(r"ended with exit code ([0-9]+)")
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|MemoryError", re.IGNORECASE)


async def publish_loss(bus: Bus, clock: Clock, loss: WorkerLossRecord) -> None:
    """Publish a record and return once it is stored, however long the bus is unreachable.

    A record that the bus forbids is logged and lost.
    """
    delays = doubling_delays(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
    try:
        await retry(lambda: bus.outbox.publish(loss), delays, clock.sleep, retried=is_retryable)
    except MillraceError as error:
        logger.warning(
            "a lost worker is not recorded",
            extra={"worker_id": loss.worker_id, "reason": error.message},
        )


def cause_of_code(code: int, oom_kills_before: int) -> tuple[LossCause, str]:
    """Return the cause and detail of a process that ended with a return code.

    ``oom_kills_before`` is as in ``was_out_of_memory``.
    """
    if code >= 0:
        return LossCause.EXIT, str(code)
    is_oom = was_out_of_memory(code, oom_kills_before)
    return LossCause.OUT_OF_MEMORY if is_oom else LossCause.SIGNAL, signal_name(code)


def cause_of_text(why: str, *, is_oom_kill: bool) -> tuple[LossCause, str]:
    """Return the cause and detail of an engine that reports why it ended.

    The rest of the text is dropped, as libraries quote their input in it. ``is_oom_kill``: Linux
    killed a process for lack of memory since the engine began.
    """
    if found := _SIGNAL.search(why):
        is_oom = is_oom_kill and found[1] == "SIGKILL"
        return LossCause.OUT_OF_MEMORY if is_oom else LossCause.SIGNAL, found[1]
    found = _EXIT.search(why)
    detail = "" if found is None else found[1]
    if _OUT_OF_MEMORY.search(why):
        return LossCause.OUT_OF_MEMORY, detail
    return LossCause.EXIT, detail
