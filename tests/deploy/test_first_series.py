"""Prometheus sees no increase in a series that begins at 1, so series are there before.

Each labelled counter and histogram of a fresh process has, for what the process knows (its model,
its worker), a series of each value that its other labels can have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.gateway.app import build_app
from millrace.gateway.core import Backends, Gateway
from millrace.gateway.metrics import SERVER_FAULTS
from millrace.gateway.models import LoadedModels
from millrace.registry.served import ServedModel
from millrace.runtime.metrics_server import Monitor
from millrace.scheduler.fleet.fleet import Departure
from millrace.scheduler.jobs.terminal_status import FORESEEN_ENDS
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.scheduler.state import DispatchResult, MovedBy, Rerun
from millrace.schemas.config import ClickHouseConfig, Config
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Source, Tier
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.models.rollouts import RolloutState
from millrace.schemas.records import Status
from millrace.schemas.tenants import LimitSet
from millrace.telemetry.metrics import TelemetryMetrics
from millrace.telemetry.service import TelemetryService
from millrace.telemetry.store.tables import TABLES
from millrace.workers.host.metrics import WorkerMetrics
from tests.deploy.known_metrics import known_metrics
from tests.scheduler.world import World
from tests.support.manual_clock import ManualClock
from tests.support.repository import ROOT
from tests.workers.host.conftest import demo  # noqa: F401 (a fixture)
from tests.workers.scripted import bench

# Labels whose values cannot be listed before they occur, and why. Series of models, workers, routes
# and experts are there at 0 once the process knows of them.
OPEN = {
    "model": "names of the catalogue, which changes",
    "worker": "names of workers, which come and go",
    "route": "templates of the application's paths",
    "expert": "numbers, as many as the model has experts",
    "code": "codes of errors, of which new ones appear with new features",
    "task": "names of long-lived tasks",
}
# These have a series for each kind that occurred (route, status and code together; task and kind),
# for each expert, of which the model here has none, or where a device counts its energy. No rule
# asks for them.
_WITHOUT_FIRST = {
    *("millrace_refused_requests", "millrace_ws_errors", "millrace_task_failures"),
    *("millrace_expert_choices", "millrace_device_energy_joules"),
    "millrace_charged_energy_joules",
}


def _values(names: Iterable[Any]) -> set[tuple[str, ...]]:
    return {(str(getattr(name, "value", name)),) for name in names}


# Of each other label, or labels that belong together, all values.
CLOSED: dict[tuple[str, tuple[str, ...]], set[tuple[str, ...]]] = {
    ("millrace_http_requests", ("status",)): _values(SERVER_FAULTS),
    ("millrace_generations", ("source",)): _values(Source),
    ("millrace_generations", ("outcome",)): _values(Status),
    ("millrace_limit_refusals", ("limit",)): _values(LimitSet.__struct_fields__),
    ("millrace_scheduler_departed_workers", ("why",)): _values(Departure),
    ("millrace_scheduler_dispatches", ("result",)): _values(DispatchResult),
    ("millrace_scheduler_reruns", ("why",)): _values(Rerun),
    ("millrace_scheduler_moves", ("source",)): _values(MovedBy),
    ("millrace_scheduler_ended_jobs", ("status", "code")): {
        (status.value, code) for status, code in FORESEEN_ENDS
    },
    ("millrace_scheduler_role_switches", ("result",)): _values(WorkerRole),
    ("millrace_scheduler_rollouts", ("result",)): _values(
        (RolloutState.COMPLETED, RolloutState.ABORTED)
    ),
    ("millrace_scheduler_queue_time_seconds", ("tier",)): _values(Tier),
    ("millrace_prefix_cache_tier_hits", ("source",)): _values(
        ("device", "host", "disk", "object", "peer")
    ),
    ("millrace_worker_requests", ("status",)): _values(Status),
    ("millrace_telemetry_dead_letters", ("source",)): _values(("sink", "bridge")),
    ("millrace_telemetry_insert_duration_seconds", ("table",)): _values(t.name for t in TABLES),
    ("millrace_telemetry_batch_rows", ("table",)): _values(t.name for t in TABLES),
}


@pytest.fixture
async def fresh(demo: ServedModel) -> AsyncIterator[list[CollectorRegistry]]:  # noqa: F811
    """Yield the registries of a fresh process of each kind."""
    clock = ManualClock()
    bus = MemoryBus(MemoryBroker(clock))
    cards = {"m": ModelCard(id="m", created=0, max_model_len=None)}
    gateway = Gateway(Backends(bus), Config(), LoadedModels(cards, cast("Any", None)), clock)
    build_app(gateway)
    service = TelemetryService(
        Config(clickhouse=ClickHouseConfig(url="http://unused:1")),
        cast("Any", type("Nowhere", (), {"reader": None})()),
        clock,
    )
    world = World()
    await world.open()
    async with bench(demo, name="w") as b:
        workers = WorkerMetrics()
        workers.watch("w", "m", b.worker._engine, b.worker)
        yield [
            gateway.metrics.registry,
            _alone(SchedulerMetrics(world.schedulers[0])),
            _alone(workers),
            _alone(TelemetryMetrics(service)),
            Monitor("any").registry,
        ]
    await world.close()


def _alone(collector: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def labelled(registries: Iterable[CollectorRegistry]) -> dict[str, tuple[tuple[str, ...], Metric]]:
    """Return our counters and histograms that have labels, as collectors and as families of a
    scrape."""
    found = {}
    for registry in registries:
        for collector in list(registry._collector_to_names):
            for family in collector.collect():
                of = collector if isinstance(collector, MetricWrapperBase) else family
                labels = tuple(getattr(of, "_labelnames", ()))
                is_ours = family.name.startswith("millrace_")
                if is_ours and labels and family.type in {"counter", "histogram"}:
                    found[family.name] = (labels, family)
    return found


def closed_groups(name: str, labels: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the labels of a metric whose values are fixed."""
    groups = [group for metric, group in CLOSED if metric == name]
    left = set(labels) - {label for group in groups for label in group} - OPEN.keys()
    if name not in _WITHOUT_FIRST:
        assert not left, f"{name}: say in CLOSED what {left} can be, or in OPEN why that is unknown"
    return groups


async def test_each_series_that_can_be_told_is_there_at_first(
    fresh: list[CollectorRegistry],
) -> None:
    metrics = labelled(fresh)
    assert {name for name, _ in CLOSED} <= metrics.keys()
    for name, (labels, family) in metrics.items():
        groups = closed_groups(name, labels)
        if name in _WITHOUT_FIRST:
            assert not family.samples
            continue
        samples = [sample.labels for sample in family.samples]
        for values in itertools.product(*(CLOSED[name, group] for group in groups)):
            wanted = {
                label: value
                for group, told in zip(groups, values, strict=True)
                for label, value in zip(group, told, strict=True)
            }
            assert any(wanted.items() <= one.items() for one in samples), (name, wanted)
        if "model" in labels:
            assert any(one["model"] == "m" for one in samples), name
        assert all(sample.value == 0 for sample in family.samples), name


async def test_all_metrics_of_the_document_are_walked(fresh: list[CollectorRegistry]) -> None:
    known = {
        one.name.removesuffix("_total")
        for part in (await known_metrics()).values()
        for one in part
        if one.kind in {"counter", "histogram"} and one.labels
    }
    assert labelled(fresh).keys() == known


def test_the_document_lists_the_open_labels() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    [told] = re.findall(r"Open labels are (.+?)\.$", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", told)) == OPEN.keys()


async def test_our_own_faults_are_counted_from_the_start() -> None:
    """Every status from 500 on that an error of ours has is counted from the start."""

    def kinds(of: type[MillraceError]) -> Iterable[type[MillraceError]]:
        yield of
        for kind in of.__subclasses__():
            yield from kinds(kind)

    assert {kind.http_status for kind in kinds(MillraceError)} & set(range(500, 600)) <= set(
        SERVER_FAULTS
    )


def rules() -> list[dict[str, Any]]:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


async def test_series_of_rules_exist_at_first(fresh: list[CollectorRegistry]) -> None:
    """Every series whose increase a rule computes exists at first."""
    there = [
        (sample.name, sample.labels)
        for registry in fresh
        for family in registry.collect()
        for sample in family.samples
    ]
    asked = [one for rule in rules() for one in _asked(rule["expr"])]
    assert len(asked) > 15
    assert not [metric for metric, _ in asked if metric.removesuffix("_total") in _WITHOUT_FIRST]
    for metric, matchers in asked:
        found = [
            labels
            for name, labels in there
            if name == metric and all(_matches(labels, *matcher) for matcher in matchers)
        ]
        assert found, (metric, matchers)


def _asked(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    asked = re.findall(r"(?:rate|increase)\((millrace_\w+)(?:\{([^}]*)\})?\[", expression)
    matcher = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
    return [(metric, matcher.findall(matchers)) for metric, matchers in asked]


def _matches(labels: dict[str, str], label: str, operator: str, value: str) -> bool:
    is_equal = re.fullmatch(value if "~" in operator else re.escape(value), labels.get(label, ""))
    return bool(is_equal) != operator.startswith("!")
