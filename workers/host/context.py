"""What all parts of one incarnation of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from bus.api import Bus
from registry.served import ServedModel
from runtime.clock import Clock
from schemas.config import WorkerConfig
from workers.host.energy.meter import EnergyMeter
from workers.process.keeper import EngineKeeper


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Who the worker is, its settings, the model that it serves, and its bus, engine and clock, and
    the meter of the engine's device."""

    worker_id: str
    config: WorkerConfig
    model: ServedModel
    bus: Bus
    engine: EngineKeeper
    clock: Clock
    energy: EnergyMeter
