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
        advice="Look at queue and KV cache on the board Capacity. More workers, or lower bounds "
        "for the tiers that may wait.",
    ),
    AlertRule(
        name="MillraceFirstTokensOftenLate",
        severity="ticket",
        bound=6 * 0.05,
        unit=SHARE,
        meaning="First tokens of a model have come late for hours",
        advice="Not urgent: capacity is short for hours of the day.",
    ),
    AlertRule(
        name="MillraceStreamsStall",
        severity="ticket",
        bound=0.05,
        unit=SHARE,
        for_s=300,
        meaning="Streams of a model stall",
        advice="Compare the gaps of gateways and engines on the board Latency: engines that are "
        "slow want smaller chunks of prompts (`worker.engine.itl_bound_ms`), gateways that are "
        "want company.",
    ),
    AlertRule(
        name="MillraceGenerationsFail",
        severity="page",
        bound=0.02,
        unit=SHARE,
        for_s=120,
        meaning="Generations of a model fail",
        advice="The board Reliability has the error codes, each with a request to look at on the "
        "operations page.",
    ),
    AlertRule(
        name="MillraceShedding",
        severity="page",
        bound=0.1,
        unit=PER_S,
        for_s=120,
        meaning="Requests for a model are refused",
        advice="The queue is full, or the wait would be longer than the bound of a tier. More "
        "workers.",
    ),
    AlertRule(
        name="MillracePoison",
        severity="ticket",
        bound=0,
        unit=COUNT,
        meaning="A request for a model killed its workers",
        advice="The queue's dead letters have the request. The log names the workers that died.",
    ),
    AlertRule(
        name="MillraceKvCacheFull",
        severity="ticket",
        bound=0.95,
        unit=SHARE,
        for_s=300,
        meaning="The KV cache of a worker is full",
        advice="Shorter contexts, more blocks (`worker.engine.kv_cache_bytes`), or more workers.",
    ),
    AlertRule(
        name="MillraceQueueOld",
        severity="page",
        bound=30,
        unit=SECONDS,
        for_s=60,
        meaning="Requests for a model wait too long",
        advice="Workers are too few, gone, or full: see the two boards.",
    ),
    AlertRule(
        name="MillraceQueueNearlyFull",
        severity="ticket",
        bound=0.8,
        unit=SHARE,
        for_s=120,
        meaning="The queue of a model is nearly full",
        advice="Before it is full: more workers, or a higher `scheduler.max_queued_jobs`.",
    ),
    AlertRule(
        name="MillraceNoWorkers",
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=120,
        meaning="A model has no workers",
        advice="Start one. Requests wait meanwhile and are not lost.",
    ),
    AlertRule(
        name=SCHEDULER_SILENT,
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=60,
        meaning="No scheduler is heard",
        advice="Start one, or look at the message bus. Requests wait meanwhile and are not lost.",
    ),
    AlertRule(
        name="MillraceStoreFull",
        severity="page",
        bound=0,
        unit=COUNT,
        for_s=30,
        meaning="A store takes nothing",
        advice="Its disk is full, or nats-server gave streams up when it was: `/healthz` of a "
        "gateway says which. Make room; outside `millrace up`, start nats-server again if it still "
        "says so then. See [When a disk is full](protocol.md#when-a-disk-is-full).",
    ),
    AlertRule(
        name="MillraceStoreShort",
        severity="ticket",
        bound=1e9,
        unit=BYTES,
        for_s=300,
        meaning="A store's disk is nearly full",
        advice="Make room, or move the store to a larger disk.",
    ),
    AlertRule(
        name="MillraceTelemetryBehind",
        severity="ticket",
        bound=50_000,
        unit=COUNT,
        for_s=600,
        meaning="Analytics are behind",
        advice="ClickHouse is slow or unreachable, or there is more than one sink can store: start "
        "another telemetry process.",
    ),
    AlertRule(
        name="MillraceTelemetryStands",
        severity="ticket",
        bound=120,
        unit=SECONDS,
        for_s=300,
        meaning="Nothing is stored in ClickHouse though there is something to store",
        advice="The log of the telemetry process.",
    ),
    AlertRule(
        name="MillraceOutboxFills",
        severity="ticket",
        bound=100_000,
        unit=COUNT,
        for_s=600,
        meaning="Records pile up in the outbox",
        advice="Kafka is unreachable, or no telemetry process runs. Nothing is lost before "
        "`nats.outbox_max_age_s`.",
    ),
    AlertRule(
        name="MillraceUsageOld",
        severity="ticket",
        bound=300,
        unit=SECONDS,
        for_s=300,
        meaning="Usage by the minute is old",
        advice="ClickHouse is busy, or the statement fails: the log says so. Reports of usage lack "
        "the latest minutes.",
    ),
    AlertRule(
        name="MillraceTelemetryAbsent",
        severity="ticket",
        bound=0,
        unit=COUNT,
        for_s=600,
        meaning="No telemetry process is scraped",
        advice="Start it, or give Prometheus its address.",
    ),
)

RULES = {rule.name: rule for rule in _ALL}
