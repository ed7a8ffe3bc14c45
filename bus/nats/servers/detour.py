"""Detours in a NATS cluster whose servers cannot all see each other.

NATS passes messages between two servers only directly. While their link is down, their clients do
not reach each other, although a third server reaches both.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from nats.aio.client import Srv

from millrace.bus.control import Control
from millrace.bus.nats.connection import Connection
from millrace.schemas.control import WorkerCommand
from millrace.schemas.errors import MillraceError
from millrace.schemas.redaction import redact_urls

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 0.5
_MOVE_TIMEOUT_S = 2.0
# After a failed search, the same worker is not searched for during this time.
_PAUSE_S = 2.0


class Detours:
    """Search for a server over which a silent worker answers.

    One search runs at a time. A move ends the search of all callers that wait.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._searching = asyncio.Lock()
        self._num_moves = 0
        self._sought_s: dict[str, float] = {}

    async def reach(
        self, worker_id: str, command: WorkerCommand, timeout_s: float, others: Sequence[str] = ()
    ) -> bool:
        """Move to a server over which the worker does ``command``.

        Of several such servers, the one over which most of ``others`` answer is chosen. Returns
        True if the connection moved, also for another caller while this one waited.
        """
        num_moves = self._num_moves
        async with self._searching:
            if self._num_moves > num_moves:
                return True
            if not self._is_due(worker_id):
                return False
            server = await self._server_of(worker_id, command, timeout_s, others)
            if server is None:
                return False
            self._num_moves += 1
            logger.warning(
                "moving to another NATS server, over which a silent worker answers",
                extra={"worker_id": worker_id, "url": redact_urls(server.uri.geturl())},
            )
            await self._connection.move_to(server)
            return await self._connection.wait_connected(_MOVE_TIMEOUT_S)

    def _is_due(self, worker_id: str) -> bool:
        now_s = asyncio.get_running_loop().time()
        oldest_s = now_s - _PAUSE_S
        self._sought_s = {name: at_s for name, at_s in self._sought_s.items() if at_s > oldest_s}
        return self._sought_s.setdefault(worker_id, now_s) == now_s

    async def _server_of(
        self, worker_id: str, command: WorkerCommand, timeout_s: float, others: Sequence[str]
    ) -> Srv | None:
        """Return the server over which the worker and most of the others answer."""
        servers = self._connection.other_servers
        random.shuffle(servers)
        counts = await asyncio.gather(
            *(self._count(server, worker_id, command, timeout_s, others) for server in servers)
        )
        most = max(counts, default=0)
        return servers[counts.index(most)] if most else None

    async def _count(
        self,
        server: Srv,
        worker_id: str,
        command: WorkerCommand,
        timeout_s: float,
        others: Sequence[str],
    ) -> int:
        """Return how many workers answer over a server; 0 unless ``worker_id`` does ``command``."""
        connection = self._connection.beside(server, _OPEN_TIMEOUT_S)
        try:
            await connection.open()
            control = Control(connection)
            answers = await asyncio.gather(
                *(control.command(name, command, timeout_s) for name in (worker_id, *others))
            )
        except MillraceError as error:
            logger.debug(
                "the worker cannot be reached over another NATS server either",
                extra={"cause": error.message},
            )
            return 0
        finally:
            await connection.close()
        does_it = answers[0] is not None and answers[0].ok
        return len(answers) - answers.count(None) if does_it else 0
