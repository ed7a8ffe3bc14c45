"""Metrics of a telemetry process: landed and failed records as Prometheus reads them."""

from __future__ import annotations

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import KafkaConfig
from millrace.telemetry.metrics import TelemetryMetrics
from millrace.telemetry.store.store import Store
from tests.support.scraped import scrape_of
from tests.support.waiting import eventually
from tests.telemetry.pipeline import count, running
from tests.telemetry.records import request_record


async def test_records_and_dead_letters_are_counted(
    store: Store, embedded_kafka: KafkaConfig
) -> None:
    bus = MemoryBus(MemoryBroker(SystemClock()))
    async with running(bus, store, embedded_kafka) as service:
        metrics = TelemetryMetrics(service)
        for number in range(5):
            await bus.outbox.publish(request_record(number))

        async def landed() -> bool:
            return await count(store) == 5

        await eventually(landed, 20.0)
        lag = "millrace_telemetry_lag_messages"
        waiting = "millrace_telemetry_outbox_waiting_records"
        topic = {"topic": "millrace.requests.v1"}

        # Both are looked at from time to time, each in its own.
        def caught_up() -> bool:
            scraped = scrape_of(metrics)
            if not {lag, waiting} <= set(scraped.sample_names):
                return False
            return scraped.value(lag, **topic) == 0 == scraped.value(waiting)

        await eventually(caught_up)
        rounds = "millrace_telemetry_rollup_age_seconds"
        await eventually(lambda: rounds in scrape_of(metrics).sample_names)
        scraped = scrape_of(metrics)
        assert scraped.value("millrace_telemetry_stored_records_total") == 5
        assert scraped.value("millrace_telemetry_bridged_records_total") == 5
        assert scraped.value("millrace_telemetry_dead_letters_total", source="sink") == 0
        assert scraped.value("millrace_telemetry_insert_failures_total") == 0
        assert scraped.value("millrace_telemetry_batch_rows_sum", table="requests") == 5
        assert scraped.value(
            "millrace_telemetry_insert_duration_seconds_count", table="requests"
        ) == scraped.value("millrace_telemetry_batch_rows_count", table="requests")
        assert scraped.value("millrace_telemetry_last_stored_timestamp_seconds") > 1.7e9
        assert scraped.value(rounds) < 60.0
