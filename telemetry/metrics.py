"""Prometheus metrics of a telemetry process, read at each scrape from its parts' counters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.bus.storage import CLICKHOUSE, KAFKA
from millrace.bus.store.watch import StoreMetrics
from millrace.telemetry.service import TelemetryService

# Older name of a counter, kept for one version: promtool takes "minutes" for a unit.
DEPRECATED = "millrace_telemetry_rollup_minutes"


class TelemetryMetrics(Collector):
    """Collector whose labels are Millrace's topics and tables."""

    def __init__(self, service: TelemetryService) -> None:
        self._service = service
        stores = service.stores
        self._stores = StoreMetrics((KAFKA, CLICKHOUSE), stores.troubles, lambda: stores.watch.free)

    def collect(self) -> Iterator[Metric]:
        yield from self._behind()
        yield from self._bridge()
        yield from self._sink()
        yield from self._inserts()
        yield from self._stores.collect()

    def _behind(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily(
            "millrace_telemetry_lag_messages",
            "Messages in Kafka that are not in ClickHouse yet, of the whole group of sinks",
            labels=["topic"],
        )
        for topic, num_behind in self._service.sink.lag().items():
            lag.add_metric([topic], num_behind)
        yield lag
        yield GaugeMetricFamily(
            "millrace_telemetry_rollup_age_seconds",
            "Seconds since usage by the minute was last up to date",
            self._service.rollups.age_s,
        )
        num_computed = self._service.rollups.num_computed
        yield CounterMetricFamily(
            "millrace_telemetry_rollup_computations",
            "Number of computations of a minute's usage",
            num_computed,
        )
        yield CounterMetricFamily(
            DEPRECATED,
            "Older name of millrace_telemetry_rollup_computations_total, for this version only",
            num_computed,
        )

    def _bridge(self) -> Iterator[Metric]:
        bridge = self._service.bridge
        waiting = GaugeMetricFamily(
            "millrace_telemetry_outbox_waiting_records",
            "Records that are not in Kafka yet: in the outbox, or on their way to it",
        )
        bridged = CounterMetricFamily(
            "millrace_telemetry_bridged_records", "Records sent from the outbox to Kafka"
        )
        if bridge is not None:
            waiting.add_metric([], bridge.num_waiting + self._service.unstored.count())
            bridged.add_metric([], bridge.num_bridged)
        yield from (waiting, bridged)

    def _sink(self) -> Iterator[Metric]:
        sink, bridge = self._service.sink, self._service.bridge
        yield CounterMetricFamily(
            "millrace_telemetry_stored_records",
            "Records that became rows, some of them twice",
            sink.num_stored,
        )
        dead = CounterMetricFamily(
            "millrace_telemetry_dead_letters",
            "Records that cannot be stored and went to the dead letters, by the part that found "
            "them",
            labels=["source"],
        )
        dead.add_metric(["sink"], sink.num_dead)
        dead.add_metric(["bridge"], 0 if bridge is None else bridge.num_dead)
        yield dead
        yield CounterMetricFamily(
            "millrace_telemetry_insert_failures",
            "Writes that ClickHouse did not accept and that were retried",
            sink.insertion.num_failures,
        )
        yield GaugeMetricFamily(
            "millrace_telemetry_last_stored_timestamp_seconds",
            "Time at which the latest batch was stored, in seconds of the UTC epoch; 0 before the "
            "first",
            sink.last_stored_s,
        )

    def _inserts(self) -> Iterator[Metric]:
        took = HistogramMetricFamily(
            "millrace_telemetry_insert_duration_seconds",
            "Duration of inserts into a table, in seconds",
            labels=["table"],
        )
        rows = HistogramMetricFamily(
            "millrace_telemetry_batch_rows", "Rows of an insert", labels=["table"]
        )
        for table, inserts in self._service.sink.insertion.tables.items():
            inserts.took_s.add_to(took, [table])
            inserts.rows.add_to(rows, [table])
        yield from (took, rows)
