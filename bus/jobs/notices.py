"""Word of jobs as they are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

from bus import subjects
from bus.api import Line, Subscription
from bus.transport import Message, Transport

logger = logging.getLogger(__name__)


async def watch_stored_jobs(
    transport: Transport, on_published: Callable[[Line], None]
) -> Subscription:
    """See ``bus.api.JobQueue.watch``: the server repeats the subject of what it stored."""

    def on_message(message: Message) -> None:
        try:
            line = subjects.stored_line_of(message.subject)
        except ValueError:
            return  # of no line; ``JobQueue.lines`` answers for it
        try:
            on_published(line)
        except Exception:
            logger.exception("a watcher failed", extra={"subject": message.subject})

    return await transport.subscribe(subjects.ALL_STORED_JOBS, on_message)
