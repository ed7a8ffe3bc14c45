"""What the telemetry process sees of the alerts that go by its own state; rows tell the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from millrace.bus.storage import CLICKHOUSE, KAFKA
from millrace.bus.store.conditions import store_conditions
from millrace.runtime.alerts.rules import RULES
from millrace.runtime.alerts.watch import Condition


class RecordFlow(NamedTuple):
    """How far records have come: ``num_waiting`` are not in Kafka, ``num_behind`` are there and not
    in ClickHouse, where the latest landed at ``last_stored_s`` (Unix time, 0: none so far).
    ``usage_age_s`` is for how long usage by the minute lacks what is stored; None: unknown."""

    now_s: float
    num_waiting: int
    num_behind: int
    last_stored_s: float
    usage_age_s: float | None
    troubles: Mapping[str, str]
    free_bytes: Mapping[str, int]


def conditions_of(flow: RecordFlow) -> Iterator[Condition]:
    """The conditions of a telemetry process."""
    stood_s = flow.now_s - flow.last_stored_s if flow.num_behind and flow.last_stored_s else 0.0
    yield _over("MillraceOutboxFills", flow.num_waiting)
    yield _over("MillraceTelemetryBehind", flow.num_behind)
    yield _over("MillraceTelemetryStands", stood_s)
    yield _over("MillraceUsageOld", flow.usage_age_s)
    yield from store_conditions((KAFKA, CLICKHOUSE), flow.troubles, flow.free_bytes)


def _over(name: str, value: float | None) -> Condition:
    return Condition(name=name, value=value, holds=value is not None and value > RULES[name].bound)
