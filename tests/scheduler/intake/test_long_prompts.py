"""Jobs with long texts: their tokenisation does not delay other jobs."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from millrace.bus.jobs.decoding import read_job
from millrace.runtime.json.faults import MAX_TOKEN_IDS
from millrace.schemas.errors import MalformedMessageError
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import Job
from tests.scheduler.world import FakeModel, World, job

LONG = "many words " * 10_000


class HeldModel(FakeModel):
    """Long prompts wait to be let go."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.go = threading.Event()

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        if len(job.prompt or "") > 4_096:
            self.threads.append(threading.get_ident())
            assert self.go.wait(30)
        return super().prepare(job, seed_source)


@pytest.fixture
async def held() -> AsyncIterator[tuple[World, HeldModel]]:
    model = HeldModel()
    world = World(load=lambda _name: model)
    await world.open()
    yield world, model
    model.go.set()
    await world.close()


async def passes(world: World, predicate: Callable[[], bool]) -> None:
    """Advance virtual and real time until ``predicate`` holds."""
    async with asyncio.timeout(30.0):
        while not predicate():
            await world.clock.advance(0.05)
            await asyncio.sleep(0.005)


async def test_short_jobs_run_while_long_ones_are_read(held: tuple[World, HeldModel]) -> None:
    world, model = held
    worker = await world.add_worker(num_slots=10)
    for number in range(3):
        await world.client.jobs.publish(
            job(f"long-{number}", prompt=LONG, prompt_token_ids=None, tenant="other")
        )
    await passes(world, lambda: len(model.threads) == 1)
    for number in range(4):
        await world.client.jobs.publish(job(f"short-{number}", prompt="hi", prompt_token_ids=None))
    await passes(world, lambda: len(worker.running) == 4)
    assert len(model.threads) == 1
    assert threading.get_ident() not in model.threads
    model.go.set()
    await passes(world, lambda: len(_refused(world)) == 3)
    assert _refused(world) == {f"long-{number}" for number in range(3)}


def test_a_job_of_more_token_ids_than_any_prompt_has_is_no_job() -> None:
    payload = b'{"request_id":"r","model":"m","prompt_token_ids":[%b5]}' % (b"5," * MAX_TOKEN_IDS)
    with pytest.raises(MalformedMessageError, match=f"at most {MAX_TOKEN_IDS} are taken"):
        read_job("jobs.m.free", payload, "application/json", 1)


def _refused(world: World) -> set[str]:
    return {
        request_id
        for request_id, frame in world.frames
        if isinstance(frame, Failed) and frame.code == "context_length_exceeded"
    }
