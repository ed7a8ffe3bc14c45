"""Startup of a part: its connections, and the errors that prevent its start."""

from __future__ import annotations

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.bus.running_requests import RunningRequestIndex
from millrace.schemas.config import Config


async def enter(config: Config, name: str, part: Part) -> tuple[Bus, RunningRequestIndex]:
    """Connect to the bus and the index of running requests; the caller closes both.

    Raises:
        ConfigError: NATS or Redis is misconfigured.
        UntrustedServerError: NATS or Redis cannot be trusted.
        CredentialsRefusedError: NATS or Redis refuses the credentials.
        BusUnavailableError: No NATS server answers. An unreachable Redis does not prevent the
            start.
    """
    index = RunningRequestIndex(config.redis)
    try:
        await index.check()
        return await nats.connect(config.nats, name, part=part), index
    except BaseException:
        await index.close()
        raise
