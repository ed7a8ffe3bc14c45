"""Rules of the alerts that the system reports itself.

Names, times and bounds are those of ``deploy/prometheus/alerts.yml``, the texts those of
``docs/monitoring.md``. A test checks that.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SHARE, PER_S, COUNT, SECONDS, BYTES = "share", "per_s", "count", "s", "bytes"
# Reported by a gateway. Prometheus has no such rule: it sees a scheduler that is not scraped.
SCHEDULER_SILENT = "SchedulerSilent"


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """Alert rule: fires once its condition has held for ``for_s``.

    The condition is a value above ``bound`` (for free space: below), in ``unit``. ``severity`` is
    ``page`` to wake someone up, ``ticket`` for the next working day.
    """

    name: str
    severity: Literal["page", "ticket"]
    bound: float
    unit: str
    meaning: str
    advice: str
    for_s: float = 0.0


_ALL = (
    AlertRule(
        name="MillraceFirstTokensLate",
        severity="page",
        bound=14.4 * 0.05,
        unit=SHARE,
        meaning="First tokens of a model come late",
        advice="Check queue and KV cache on the board Capacity. Add workers, or lower "
        "`ttft_bound_ms` of less urgent tiers.",
    ),
    AlertRule(
        name="MillraceFirstTokensOftenLate",
        severity="ticket",
        bound=6 * 0.05,
        unit=SHARE,
        meaning="First tokens of a model have come late for hours",
        advice="Capacity is short for hours of the day. This is not urgent: plan more workers.",
    ),
    AlertRule(
        name="MillraceStreamsStall",
        severity="ticket",
        bound=0.05,
        unit=SHARE,
        for_s=300,
        meaning="Streams of a model stall",
        advice="Compare the gaps of gateways and engines on the board Latency. For slow engines, "
        "lower `worker.engine.itl_bound_ms`. For slow gateways, add a gateway.",
    ),
    AlertRule(
        name="MillraceGenerationsFail",
        severity="page",
        bound=0.02,
        unit=SHARE,
        for_s=120,
        meaning="Generations of a model fail",
        advice="The board Reliability has the error codes, each with an example request for the "
        "operations page.",
    ),
    AlertRule(
        name="MillraceShedding",
        severity="page",
        bound=0.1,
        unit=PER_S,
        for_s=120,
        meaning="Requests for a model are refused",
        advice="The queue is full, or the predicted wait is above the tier's bound. Add workers.",
    ),
    AlertRule(
        name="MillracePoison",
        severity="ticket",
        bound=0,
        unit=COUNT,
        meaning="A request for a model killed its workers",
        advice="The queue's dead letters have the request. The log names the workers.",
    ),
    AlertRule(
        name="MillraceKvCacheFull",
        severity="ticket",
        bound=0.95,
        unit=SHARE,
        for_s=300,
        meaning="The KV cache of a worker is full",
        advice="Shorten contexts, add blocks (`worker.engine.kv_cache_bytes`), or add workers.",
    ),
    AlertRule(
        name="MillraceQueueOld",
        severity="page",
        bound=30,
        unit=SECONDS,
        for_s=60,
        meaning="Requests for a model wait too long",
        advice="Too few workers, lost workers, or full workers: see the boards Capacity and "
        "Reliability.",
    ),
    AlertRule(
        name="MillraceQueueNearlyFull",
        severity="ticket",
        bound=0.8,
        unit=SHARE,
        for_s=120,
        meaning="The queue of a model is nearly full",
        advice="Add workers, or raise `scheduler.max_queued_jobs`.",
    ),
    AlertRule(
        name="MillraceNoWorkers",
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=120,
        meaning="A model has no workers",
        advice="Start a worker. Requests wait, and are not lost.",
    ),
    AlertRule(
        name=SCHEDULER_SILENT,
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=60,
        meaning="No scheduler sends reports",
        advice="Start a scheduler, or check the message bus. Requests wait, and are not lost.",
    ),
    AlertRule(
        name="MillraceStoreFull",
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=30,
        meaning="A store accepts no writes",
        advice="Its disk is full, or nats-server closed its streams when the disk was full: "
        "`/healthz` of a gateway says which. Free disk space. Outside `millrace up`, restart "
        "nats-server if `/healthz` still reports it. See [When a disk is "
        "full](protocol.md#when-a-disk-is-full).",
    ),
    AlertRule(
        name="MillraceStoreShort",
        severity="ticket",
        bound=1e9,
        unit=BYTES,
        for_s=300,
        meaning="A store's disk is nearly full",
        advice="Free disk space, or move the store to a larger disk.",
    ),
    AlertRule(
        name="MillraceTelemetryBehind",
        severity="ticket",
        bound=50_000,
        unit=COUNT,
        for_s=600,
        meaning="Analytics are behind",
        advice="ClickHouse is slow or unreachable, or one sink is too slow: start another "
        "telemetry process.",
    ),
    AlertRule(
        name="MillraceTelemetryStands",
        severity="ticket",
        bound=120,
        unit=SECONDS,
        for_s=300,
        meaning="Records wait, but none is stored in ClickHouse",
        advice="The log of the telemetry process has the cause.",
    ),
    AlertRule(
        name="MillraceOutboxFills",
        severity="ticket",
        bound=100_000,
        unit=COUNT,
        for_s=600,
        meaning="Records pile up in the outbox",
        advice="Kafka is unreachable, or no telemetry process runs. Records are lost after "
        "`nats.outbox_max_age_s`.",
    ),
    AlertRule(
        name="MillraceUsageOld",
        severity="ticket",
        bound=300,
        unit=SECONDS,
        for_s=300,
        meaning="Usage by the minute is out of date",
        advice="ClickHouse is busy, or the statement fails: the log of the telemetry process has "
        "the error. Usage reports lack the latest minutes.",
    ),
    AlertRule(
        name="MillraceTelemetryAbsent",
        severity="ticket",
        bound=0,
        unit=COUNT,
        for_s=600,
        meaning="No telemetry process is scraped",
        advice="Start a telemetry process, or give Prometheus its address.",
    ),
)

RULES = {rule.name: rule for rule in _ALL}
