"""Notices of jobs and of results as they are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millrace.bus import subjects
from millrace.bus.job_queue import TenantQueue
from millrace.bus.transport import Message, Subscription, Transport

logger = logging.getLogger(__name__)


async def watch_stored_jobs(
    transport: Transport, on_published: Callable[[TenantQueue], None]
) -> Subscription:
    """See ``bus.job_queue.JobQueue.watch``: the server repeats the subject of what it stored."""

    def on_message(message: Message) -> None:
        try:
            tenant_queue = subjects.stored_tenant_queue_of(message.subject)
        except ValueError:
            return  # of no tenant queue; ``JobQueue.tenant_queues`` answers for it
        try:
            on_published(tenant_queue)
        except Exception:
            logger.exception("a watcher failed", extra={"subject": message.subject})

    return await transport.subscribe(subjects.ALL_STORED_JOBS, on_message)


async def watch_results(
    transport: Transport, tenant: str, on_stored: Callable[[str], None]
) -> Subscription:
    """See ``bus.api.Results.watch``: what goes to the stream passes by everybody who listens."""

    def on_message(message: Message) -> None:
        on_stored(subjects.last_token(message.subject))

    return await transport.subscribe(subjects.results_of(tenant), on_message)
