"""How the process of a part ends: one sentence, and an exit code that says whose fault it is."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

from millrace.schemas.errors import ConfigError, MillraceError, ModelNotFoundError

DONE = 0
FAILED = 1
MISCONFIGURED = 2

logger = logging.getLogger(__name__)


def exit_code_of(part: str, run: Callable[[], None]) -> int:
    """Run a part to its end and return its exit code.

    ``MISCONFIGURED``, with a sentence on stderr, if its configuration is at fault or names a model
    that there is not; ``FAILED`` if anything else ends it, with a sentence, or, for a bug, with
    its traceback in the log.
    """
    try:
        run()
    except MillraceError as error:
        sys.stderr.write(f"{part}: {error.message}\n")
        is_setting = isinstance(error, ConfigError | ModelNotFoundError)
        return MISCONFIGURED if is_setting else FAILED
    except Exception:
        logger.exception("the process failed")
        return FAILED
    return DONE


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT from now on. Call it in the event loop."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping
