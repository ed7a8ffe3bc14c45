"""Word of results as they are stored."""

from __future__ import annotations

from collections.abc import Callable

from bus import subjects
from bus.transport import Message, Subscription, Transport


async def watch_results(
    transport: Transport, tenant: str, on_stored: Callable[[str], None]
) -> Subscription:
    """See ``bus.api.Results.watch``: what goes to the stream passes by everybody who listens."""

    def on_message(message: Message) -> None:
        on_stored(subjects.last_token(message.subject))

    return await transport.subscribe(subjects.results_of(tenant), on_message)
