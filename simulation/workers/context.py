"""Shared context of a simulation's workers."""

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
    """Shared context. ``spawn`` runs the sending of messages; ``network`` connects the caches."""

    bus: Bus
    clock: Clock
    config: WorkerConfig
    outcomes: Outcomes
    network: KvNetwork
    spawn: Spawn
