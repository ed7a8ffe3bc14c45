"""Return of a client to the server of its first connection.

A rolling restart moves every client away from its server. Without a return, all clients end up at
the servers that were restarted first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

from nats.aio.client import Srv

from millrace.bus.nats.servers.client import SecureClient
from millrace.schemas.redaction import redact_urls

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 1.0
_GREETING = b"INFO "
# Random pause between two checks, in seconds, so that clients do not all move at once.
_PAUSES_S = (20.0, 60.0)


class Home:
    """Return of ``client`` to its home, the server of its first connection.

    It moves 20 to 60 s after a loss, once that server sends its greeting and is not shutting down.
    It moves once for each loss.
    """

    def __init__(self, client: SecureClient) -> None:
        self._client = client
        self._server: Srv | None = None
        self._returning: asyncio.Task[None] | None = None

    def note_connected(self) -> None:
        """Note a new connection; start the return if it is not to the home."""
        if self._server is None:
            self._server = self._client.server
        elif self._is_away and (self._returning is None or self._returning.done()):
            self._returning = asyncio.create_task(self._return(self._server), name="return")

    def settle(self, server: Srv) -> None:
        """Make ``server`` the home."""
        self._server = server

    def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()

    @property
    def _is_away(self) -> bool:
        return self._client.server is not self._server

    async def _return(self, server: Srv) -> None:
        while self._is_away and not self._client.is_closed:
            await asyncio.sleep(random.uniform(*_PAUSES_S))
            if server is not self._server:
                return  # the home was changed meanwhile
            greeting = await _greeting_of(server) if self._client.is_connected else None
            if greeting is None or greeting.get("ldm"):
                continue
            if greeting.get("server_id") == self._client.server_id:
                self._server = self._client.server  # the server has two addresses
                return
            logger.info(
                "the connection moves back to its first NATS server",
                extra={"url": redact_urls(server.uri.geturl())},
            )
            await self._client.move_to(server)


async def _greeting_of(server: Srv) -> dict[str, Any] | None:
    """Return the INFO with which a server greets; None if it does not answer.

    A WebSocket server greets only after a handshake: if it accepts a connection, an empty INFO is
    returned.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(server.uri.hostname, server.uri.port)
            try:
                line = b"" if server.uri.scheme in {"ws", "wss"} else await reader.readline()
            finally:
                writer.transport.abort()
    except (OSError, ValueError):
        return None
    if server.uri.scheme in {"ws", "wss"}:
        return {}
    try:
        return dict(json.loads(line.removeprefix(_GREETING)))
    except (TypeError, ValueError):
        return None
