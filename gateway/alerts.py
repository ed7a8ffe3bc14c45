"""Alerts that a gateway evaluates: queues, workers and its stores."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.bus.storage import NATS, REDIS
from millrace.bus.store.watch import StoreWatch, store_conditions
from millrace.gateway.streams.fleet_view import FleetView
from millrace.runtime.alerts.rules import RULES, SCHEDULER_SILENT
from millrace.runtime.alerts.watch import Alert, AlertCondition, AlertWatch
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks

_LOOK_EVERY_S = 5.0
_ABSENT = "MillraceTelemetryAbsent"


class GatewayAlerts:
    """Evaluation of alert conditions every few seconds, so that the operations page knows since
    when each condition holds.

    Owns its task: ``start`` starts it, ``close`` ends it.
    """

    def __init__(self, fleet: FleetView, stores: StoreWatch, clock: Clock) -> None:
        self._fleet = fleet
        self._stores = stores
        self._clock = clock
        self._watch = AlertWatch(clock)
        self._telemetry = AlertWatch(clock)
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.repeat(self.look, _LOOK_EVERY_S, self._clock, "alerts")

    async def close(self) -> None:
        await self._tasks.close()

    async def look(self) -> None:
        self._watch.look(self._conditions())

    def alerts(self) -> list[Alert]:
        """Return the alerts of the last evaluation."""
        return self._watch.alerts()

    def note_telemetry(self, *, answers: bool) -> list[Alert]:
        """Return the alert on the telemetry process, which was queried just now. Its start time is
        known only as precisely as the queries are frequent.
        """
        self._telemetry.look([AlertCondition(name=_ABSENT, holds=not answers)])
        return self._telemetry.alerts()

    def _conditions(self) -> Iterator[AlertCondition]:
        queues = self._fleet.queues()
        yield AlertCondition(name=SCHEDULER_SILENT, holds=not queues)
        for queue in queues:
            yield AlertCondition(
                name="MillraceNoWorkers",
                subject=queue.model,
                value=queue.num_workers,
                holds=queue.num_workers == 0 and queue.num_queued > 0,
            )
            yield _over("MillraceQueueOld", queue.model, queue.interactive_wait_s)
            if queue.bound:
                share = queue.num_bounded / queue.bound
                yield _over("MillraceQueueNearlyFull", queue.model, share)
        yield from store_conditions((NATS, REDIS), self._stores.troubles(), self._stores.free)


def _over(name: str, subject: str, value: float) -> AlertCondition:
    return AlertCondition(name=name, subject=subject, value=value, holds=value > RULES[name].bound)
