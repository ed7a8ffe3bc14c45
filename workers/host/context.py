"""What all parts of one incarnation of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.bus.api import Bus
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import WorkerConfig
from millrace.workers.host.energy import EnergyMeter
from millrace.workers.process.keeper import EngineKeeper


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

    @property
    def capacity(self) -> int:
        """How many requests run and wait here at most."""
        return self.engine.max_num_sequences + self.config.max_num_waiting
