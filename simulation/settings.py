"""What a simulation is to do, as it is run and as its report says it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from millrace.bench.settings import Slo
from millrace.schemas.config import Config
from millrace.schemas.errors import ConfigError


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of that number, counted from 1, dies without a word at ``at_s``."""

    worker: int
    at_s: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation, of each policy alike.

    ``num_workers`` is by model, "" for each model of the trace that is not named. A worker that
    dies, at ``failures`` or after a random time of ``mtbf_s`` in the mean (0: never), is started
    anew ``restart_s`` later; to start takes a worker ``config.worker.engine.simulation.start_s``.
    With ``config.scheduler.autoscale.max_workers`` the scheduler says how many workers there are.
    Requests that are not answered ``drain_s`` after the last arrival are unfinished.
    """

    config: Config
    num_workers: dict[str, int]
    seed: int = 0
    failures: tuple[Failure, ...] = ()
    mtbf_s: float = 0.0
    restart_s: float = 5.0
    drain_s: float = 3_600.0
    slo: Slo | None = None
    gpu_hour_price: float = 2.5
    gpus_per_worker: float = 1.0

    def workers_of(self, model: str) -> int:
        """How many there are of a model at first. Raises ConfigError if nothing says so."""
        count = self.num_workers.get(model, self.num_workers.get(""))
        if count is None:
            raise ConfigError(f"--workers does not say how many workers serve {model}")
        bounds = self.config.scheduler.autoscale
        if bounds.max_workers:
            return min(max(count, bounds.min_workers), bounds.max_workers)
        return count

    def check(self, models: Iterable[str]) -> None:
        """Raises ConfigError unless this can be done for a trace of such ``models``."""
        total = sum(self.workers_of(model) for model in models)
        for failure in self.failures:
            if failure.worker > total:
                raise ConfigError(
                    f"--fail: there is no worker {failure.worker}, there are {total} at first"
                )
