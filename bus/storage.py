"""Health of the stores behind the bus."""

from __future__ import annotations

from typing import Final, Protocol

# Names of stores in errors, metrics and ``/healthz``.
NATS: Final = "nats"
REDIS: Final = "redis"
KAFKA: Final = "kafka"
CLICKHOUSE: Final = "clickhouse"


class Storage(Protocol):
    """Store of the bus itself."""

    async def failed_streams(self) -> dict[str, str]:
        """Return the streams whose files could not be written, with the cause.

        The server has given them up: they accept nothing until it is restarted, even with free
        space. Raises BusUnavailableError.
        """

    async def admit_jobs(self, *, admit: bool) -> None:
        """Make the queue refuse or accept new jobs of all publishers.

        Jobs in the queue stay. Raises BusUnavailableError.
        """
