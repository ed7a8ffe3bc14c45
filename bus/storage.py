"""Whether the stores behind the bus take what is to be kept."""

from __future__ import annotations

from typing import Final, Protocol

# What stores are called in errors, metrics and ``/healthz``.
NATS: Final = "nats"
REDIS: Final = "redis"
KAFKA: Final = "kafka"
CLICKHOUSE: Final = "clickhouse"


class Storage(Protocol):
    """The store of the bus itself."""

    async def failed_streams(self) -> dict[str, str]:
        """The streams whose files could not be written to, each with the cause. The server gives
        them up: they take nothing, space or not, until it is started again.

        Raises BusUnavailableError.
        """

    async def admit_jobs(self, *, admit: bool) -> None:
        """Have the queue refuse every new job, whoever publishes it, or take them again. What is in
        the queue stays. Raises BusUnavailableError."""
