"""Whether JetStream's files can be written to."""

from __future__ import annotations

import asyncio

from millrace.bus import subjects
from millrace.bus.nats import jetstream, topology
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.jetstream import JetStreamError
from millrace.schemas.config import NatsConfig

# No stream ever comes to it. A stream that was given up says so when it is asked to delete, also
# what it does not have; an information about it, and an ack, is answered as if nothing were wrong.
_NO_SEQUENCE = 2**62
_TIMEOUT_S = 2.0
_NOTHING_FITS = 1


class NatsStorage:
    """See ``bus.storage.Storage``."""

    def __init__(self, connection: Connection, config: NatsConfig) -> None:
        self._connection = connection
        self._config = config

    async def failed_streams(self) -> dict[str, str]:
        names = topology.names_on_disk(self._config, self._connection.server_version)
        causes = await asyncio.gather(*map(self._cause, names))
        return {name: cause for name, cause in zip(names, causes, strict=True) if cause}

    async def _cause(self, stream: str) -> str:
        """Why a stream takes nothing; empty while it does."""
        request, body = f"STREAM.MSG.DELETE.{stream}", {"seq": _NO_SEQUENCE}
        try:
            await jetstream.call(self._connection, request, body, timeout_s=_TIMEOUT_S)
        except JetStreamError as error:
            if error.number == jetstream.NOT_DELETED:
                return jetstream.cause_in_a_file(error)
        return ""

    async def admit_jobs(self, *, admit: bool) -> None:
        max_bytes = topology.ANY_SIZE if admit else _NOTHING_FITS
        await topology.update_stream(
            self._connection,
            subjects.JOBS_STREAM,
            lambda existing: {**existing, "max_msg_size": max_bytes},
            timeout_s=_TIMEOUT_S,
        )
