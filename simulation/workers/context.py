"""What all workers of a simulation share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from millrace.bus.api import Bus
from millrace.runtime.clock import Clock
from millrace.schemas.config import WorkerConfig
from millrace.simulation.outcomes import Outcomes
from millrace.simulation.workers.kv_network import KvNetwork

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class FleetContext(NamedTuple):
    """``spawn`` runs what workers send; ``network`` is between their caches."""

    bus: Bus
    clock: Clock
    config: WorkerConfig
    outcomes: Outcomes
    network: KvNetwork
    spawn: Spawn
