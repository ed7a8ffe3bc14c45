"""Metrics of every part of Millrace, from the collectors themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.core import Backends, Gateway
from millrace.gateway.models import LoadedModels
from millrace.runtime.metrics_server import Monitor
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.schemas.config import ClickHouseConfig, Config
from millrace.telemetry.metrics import TelemetryMetrics
from millrace.telemetry.service import TelemetryService
from millrace.workers.host.metrics import WorkerMetrics
from tests.scheduler.world import World
from tests.support.manual_clock import ManualClock

PARTS = ("gateway", "scheduler", "worker", "telemetry", "every part")
_SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}


class Known(NamedTuple):
    """Metric family under its name in Prometheus: counters have their suffix."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str

    @property
    def samples(self) -> set[str]:
        stem = self.name.removesuffix("_total").removesuffix("_info")
        return {f"{stem}{suffix}" for suffix in _SUFFIXES[self.kind]}


async def known_metrics() -> Mapping[str, list[Known]]:
    """Return known metrics by part, in order; metrics of every process come last."""
    parts = await registries()
    common = parts.pop("every part")
    shared = {one.name: one for one in _families(common) if one.name.startswith("millrace_")}
    by_part: dict[str, list[Known]] = {}
    for part, registry in parts.items():
        own = [one for one in _families(registry) if one.name.startswith("millrace_")]
        by_part[part] = sorted(one for one in own if one.name not in shared)
    return {**by_part, "every part": sorted(shared.values())}


async def registries() -> dict[str, CollectorRegistry]:
    """Return the metrics registry of each part of ``PARTS``, and of every part."""
    return {
        "gateway": _gateway(),
        "scheduler": await _scheduler(),
        "worker": _alone(WorkerMetrics()),
        "telemetry": _telemetry(),
        "every part": Monitor("any").registry,
    }


def _families(registry: CollectorRegistry) -> Iterator[Known]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels = (
                collector._labelnames
                if isinstance(collector, MetricWrapperBase)
                else getattr(family, "_labelnames", ())
            )
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = ("version",) if family.type == "info" else tuple(labels)
            yield Known(f"{family.name}{suffix}", family.type, labels, family.documentation)


def _gateway() -> CollectorRegistry:
    clock = ManualClock()
    bus = MemoryBus(MemoryBroker(clock))
    return Gateway(
        Backends(bus), Config(), LoadedModels({}, cast("Any", None)), clock
    ).metrics.registry


async def _scheduler() -> CollectorRegistry:
    world = World()
    await world.open()
    try:
        return _alone(SchedulerMetrics(world.schedulers[0]))
    finally:
        await world.close()


def _telemetry() -> CollectorRegistry:
    class Nowhere:
        reader = None

    config = Config(clickhouse=ClickHouseConfig(url="http://unused:1"))
    service = TelemetryService(config, cast("Any", Nowhere()), ManualClock())
    return _alone(TelemetryMetrics(service))


def _alone(collector: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
