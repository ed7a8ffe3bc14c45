"""How a part comes in: what it connects to at its start, and what keeps it from starting."""

from __future__ import annotations

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.bus.running_requests import RunningRequestIndex
from millrace.schemas.config import Config


async def enter(config: Config, name: str, part: Part) -> tuple[Bus, RunningRequestIndex]:
    """The bus and the index of generations; the caller closes both.

    Raises ConfigError, UntrustedServerError or CredentialsRefusedError if NATS or Redis cannot be
    used until somebody mends that, and BusUnavailableError if no NATS server answers. A Redis that
    is unreachable is waited for by those who use it.
    """
    index = RunningRequestIndex(config.redis)
    try:
        await index.check()
        return await nats.connect(config.nats, name, part=part), index
    except BaseException:
        await index.close()
        raise
