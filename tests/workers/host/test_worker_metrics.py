"""Prometheus metrics of a worker: its engine's work, and the times of its requests."""

from __future__ import annotations

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel
from millrace.schemas.frames import FinishReason
from millrace.workers.host.metrics import WorkerMetrics
from millrace.workers.host.reports.device_watch import DeviceReading
from tests.support.scraped import Scraped, exemplars_of, scrape_of
from tests.workers.scripted import Bench, bench

_AT = {"model": "demo", "worker": "w"}


def _scrape(b: Bench) -> Scraped:
    metrics = WorkerMetrics()
    metrics.watch("w", "demo", b.worker._engine, b.worker)
    return scrape_of(metrics)


async def test_the_engine_s_state_and_work_are_told(demo: ServedModel) -> None:
    async with bench(demo, name="w") as b:
        await b.dispatch()
        await b.dispatch(b.job("r2"))
        b.engine.step(
            num_running=1,
            num_free_blocks=75,
            num_idle_blocks=5,
            prefill_tokens=300,
            decode_tokens=20,
            prefix_query_tokens=400,
            prefix_hit_tokens=100,
            host_hit_tokens=16,
            disk_hit_tokens=20,
            object_hit_tokens=12,
            peer_hit_tokens=48,
            num_object_written_bytes=4_096,
            num_object_failures=3,
            is_object_store_left_alone=True,
            num_preemptions=2,
            busy_s=0.003,
            num_exchanges=26,
            num_exchanged_bytes=93_000,
            exchange_wait_s=0.25,
            expert_choices=(7, 0),
        )
        scraped = _scrape(b)
        told = {
            "millrace_num_requests_running": 1,
            "millrace_num_requests_waiting": 1,
            "millrace_kv_cache_blocks": 100,
            "millrace_kv_cache_used_blocks": 25,
            "millrace_kv_cache_idle_blocks": 5,
            "millrace_kv_cache_usage_perc": 0.25,
            "millrace_group_exchanges_total": 26,
            "millrace_group_exchanged_bytes_total": 93_000,
            "millrace_group_exchange_wait_seconds_total": 0.25,
            "millrace_engine_steps_total": 1,
            "millrace_engine_busy_seconds_total": 0.003,
            "millrace_engine_prefill_tokens_total": 300,
            "millrace_engine_decode_tokens_total": 20,
            "millrace_prefix_cache_queries_total": 400,
            "millrace_prefix_cache_hits_total": 100,
            "millrace_num_preemptions_total": 2,
            "millrace_kv_object_written_bytes_total": 4_096,
            "millrace_kv_object_failed_total": 3,
            "millrace_kv_object_store_left_alone": 1,
            "millrace_worker_devices": 1,
            "millrace_worker_draining": 0,
            "millrace_engine_step_duration_seconds_count": 1,
            "millrace_engine_step_duration_seconds_sum": 0.003,
        }
        assert {name: scraped.value(name, **_AT) for name in told} == told
        tiers = {"device": 4, "host": 16, "disk": 20, "object": 12, "peer": 48}
        hits = "millrace_prefix_cache_tier_hits_total"
        assert {tier: scraped.value(hits, source=tier, **_AT) for tier in tiers} == tiers
        choices = "millrace_expert_choices_total"
        assert [scraped.value(choices, expert=expert, **_AT) for expert in "01"] == [7, 0]
        bucket = "millrace_engine_step_duration_seconds_bucket"
        assert scraped.value(bucket, le="0.002", **_AT) == 0
        assert scraped.value(bucket, le="0.004", **_AT) == 1


async def test_times_of_a_request_name_its_trace(demo: ServedModel) -> None:
    """The second request's trace is not recorded, and so not named."""
    recorded, other = (f"00-{digit * 32}-{'c' * 16}-0{end}" for digit, end in (("a", 1), ("b", 0)))
    async with bench(demo, name="w") as b:
        await b.dispatch(b.job("r1", traceparent=recorded))
        await b.dispatch(b.job("r2", traceparent=other))
        for name in ("r1:1", "r2:1"):
            b.engine.emit(name, [20])
        await b.settle(0.02)
        for name in ("r1:1", "r2:1"):
            b.engine.emit(name, [21], FinishReason.LENGTH)
        await b.ended()
        metrics = WorkerMetrics()
        metrics.watch("w", "demo", b.worker._engine, b.worker)
        assert exemplars_of(metrics) == {
            f"millrace_{name}_bucket": {"a" * 32}
            for name in (
                "engine_time_to_first_token_seconds",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
            )
        }


async def test_times_between_tokens_are_those_of_the_engine(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        await b.settle(0.05)
        b.engine.emit("r1:1", [20])
        await b.settle(0.02)
        b.engine.emit("r1:1", [21, 22])
        await b.settle(0.03)
        b.engine.emit("r1:1", [23], FinishReason.LENGTH)
        await b.ended()
        scraped = _scrape(b)
        counts = {
            "millrace_engine_time_to_first_token_seconds": (1, 0.05),
            "millrace_engine_inter_token_latency_seconds": (3, 0.05),
            "millrace_request_decode_time_seconds": (1, 0.05),
            "millrace_request_prefill_time_seconds": (1, 0.05),
            "millrace_request_queue_time_seconds": (1, 0.0),
        }
        for name, (count, sum_s) in counts.items():
            assert scraped.value(f"{name}_count", **_AT) == count, name
            assert abs(scraped.value(f"{name}_sum", **_AT) - sum_s) < 1e-6, name
        gaps = "millrace_engine_inter_token_latency_seconds_bucket"
        assert scraped.value(gaps, le="0.01", **_AT) == 2
        assert scraped.value("millrace_worker_requests_total", status="done", **_AT) == 1


async def test_what_never_began_has_no_times(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        await b.command(Cancel(request_id="r1"))
        await b.ended()
        scraped = _scrape(b)
        assert scraped.value("millrace_request_queue_time_seconds_count", **_AT) == 0
        assert scraped.value("millrace_worker_requests_total", status="cancelled", **_AT) == 1


async def test_a_device_is_told_of_where_there_is_one(demo: ServedModel) -> None:
    async with bench(demo) as b:
        assert "millrace_device_utilisation_ratio" not in _scrape(b).sample_names
        b.worker.device.latest = DeviceReading("H200", 0.75, 100, 400)
        scraped = _scrape(b)
        at = {**_AT, "device": "H200"}
        assert scraped.value("millrace_device_utilisation_ratio", **at) == 0.75
        assert scraped.value("millrace_device_memory_used_bytes", **at) == 100
        assert scraped.value("millrace_device_memory_total_bytes", **at) == 400


async def test_counts_run_on_over_engines(demo: ServedModel) -> None:
    async with bench(demo) as b:
        await b.dispatch()
        b.engine.step(EngineOutput(request_id="r1:1", started=True), busy_s=1.0)
        before = b.engine
        before.fail("exit code -9")
        await b.settle(1.0)
        assert b.engine is not before
        b.engine.step(busy_s=0.25)
        scraped = _scrape(b)
        assert scraped.value("millrace_engine_restarts_total", **_AT) == 1
        assert scraped.value("millrace_engine_busy_seconds_total", **_AT) == 1.25
        assert scraped.value("millrace_engine_step_duration_seconds_count", **_AT) == 2
        assert scraped.value("millrace_engine_step_duration_seconds_sum", **_AT) == 1.25
