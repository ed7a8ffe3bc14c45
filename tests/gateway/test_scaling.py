"""Metrics of a gateway for autoscalers, and requests while a model has no worker."""

from __future__ import annotations

import asyncio

import httpx

from millrace.schemas.control import QueueStatus
from millrace.schemas.jobs import Tier
from tests.support.running_gateway import MODEL, RunningGateway
from tests.support.waiting import eventually


async def test_metrics_say_what_the_schedulers_want(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    status = QueueStatus(
        model=MODEL,
        num_queued=7,
        bound=100,
        ttft_ms={Tier.PRO: 250.0, Tier.BATCH: 9_000.0},
        oldest_wait_s=1.5,
        desired_workers=3,
    )
    front.gateway.fleet.on_queue(status)
    # Another scheduler, which has heard of less.
    front.gateway.fleet.on_queue(QueueStatus(model=MODEL, num_queued=6, bound=100))
    text = (await http.get("/metrics")).text
    assert f'millrace_desired_workers{{model="{MODEL}"}} 3.0' in text
    assert f'millrace_queued_jobs{{model="{MODEL}"}} 6.0' in text
    front.gateway.fleet.on_queue(status)
    text = (await http.get("/metrics")).text
    assert f'millrace_oldest_wait_seconds{{model="{MODEL}"}} 1.5' in text
    assert f'millrace_predicted_ttft_seconds{{model="{MODEL}",tier="pro"}} 0.25' in text
    assert f'millrace_predicted_ttft_seconds{{model="{MODEL}",tier="batch"}} 9.0' in text


async def test_a_request_waits_for_the_first_worker_of_a_model(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    await front.worker.announce(retired=True)
    await front.worker.close()
    assert (await http.get("/healthz")).json()["status"] == "waiting_for_workers"
    front.gateway.fleet.on_queue(QueueStatus(model=MODEL, num_queued=0, bound=100))
    asking = asyncio.create_task(
        http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})
    )
    await eventually(lambda: front.gateway.streams.num_served == 1)
    assert not asking.done()
    await front.worker.start()
    answer = await asking
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"]
