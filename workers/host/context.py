"""State that all parts of one incarnation of a worker share."""

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
    """Identity, settings, model, bus, engine, clock and energy meter of one worker."""

    worker_id: str
    config: WorkerConfig
    model: ServedModel
    bus: Bus
    engine: EngineKeeper
    clock: Clock
    energy: EnergyMeter

    @property
    def capacity(self) -> int:
        """Maximum number of requests that run and wait here."""
        return self.engine.max_num_sequences + self.config.max_num_waiting
