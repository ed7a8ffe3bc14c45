"""Beam searches of the demo model: by OpenAI's client, as jobs, and through deaths."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import psutil
import pytest

from millrace.bus.api import Bus
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.sampling import SamplingOptions
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

_NUM_SEARCHES, _WIDTH, _NUM_TOKENS = 3, 6, 200
_BEAMS = {"use_beam_search": True}


def client_of(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none", max_retries=0)


async def search(client: openai.AsyncOpenAI, number: int, **fields: Any) -> Any:
    return await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"What is TTFT? {number}"}],
        n=_WIDTH,
        max_tokens=_NUM_TOKENS,
        extra_body=_BEAMS | {"ignore_eos": True} | fields,
    )


def texts(answers: list[Any]) -> list[list[str]]:
    return [[choice.message.content for choice in answer.choices] for answer in answers]


@pytest.mark.slow(reason="kills under long searches; the worker host's test starts one anew")
@pytest.mark.parametrize("part", ["engine", "worker"])
async def test_searches_start_anew_when_what_runs_them_is_killed(system: System, part: str) -> None:
    """The same answers, one record each, and nothing of them twice."""
    async with client_of(system) as client:
        undisturbed = await asyncio.gather(*(search(client, i) for i in range(_NUM_SEARCHES)))
        asked = [asyncio.create_task(search(client, i)) for i in range(_NUM_SEARCHES)]
        worker = psutil.Process(system.pid("worker-1"))
        [engine] = worker.children()
        before_s = engine.cpu_times().user
        # They run: all together take more than a second of the engine's time.
        await eventually(lambda: engine.cpu_times().user > before_s + 0.3, timeout_s=30.0)
        assert not any(task.done() for task in asked)
        if part == "engine":
            engine.kill()
        else:
            system.kill("worker-1")
        answers = await asyncio.wait_for(asyncio.gather(*asked), timeout=120.0)
    assert texts(answers) == texts(undisturbed)
    for answer in answers:
        assert len({choice.message.content for choice in answer.choices}) > 1
        assert answer.usage.completion_tokens == _WIDTH * _NUM_TOKENS
    ids = ", ".join(f"'{answer.id}'" for answer in answers)

    async def recorded() -> bool:
        rows = system.sql(
            "SELECT request_id, completion_tokens, device_us "
            f"FROM requests FINAL WHERE request_id IN ({ids})"
        )
        return (
            len(rows) == _NUM_SEARCHES == len({row["request_id"] for row in rows})
            and {int(row["completion_tokens"]) for row in rows} == {_WIDTH * _NUM_TOKENS}
            and all(int(row["device_us"]) > 0 for row in rows)
        )

    await eventually(recorded, timeout_s=20.0)


async def test_a_job_on_the_bus_leaves_all_answers(system: System, bus: Bus) -> None:
    async with client_of(system) as client:
        over_http = await search(client, 1, max_tokens=20, ignore_eos=False)
    sampling = SamplingOptions(use_beam_search=True, n=_WIDTH, max_tokens=20)
    job = Job(
        request_id="beams-1",
        model="demo",
        messages=(ChatMessage("user", "What is TTFT? 1"),),
        sampling=sampling,
        store_result=True,
    )
    await bus.jobs.publish(job)

    async def is_stored() -> bool:
        return await bus.results.fetch("local", "beams-1") is not None

    await eventually(is_stored, timeout_s=30.0)
    result = await bus.results.fetch("local", "beams-1")
    assert result is not None
    assert result.status == "done", result.error_message
    assert [beam.text for beam in result.beams] == texts([over_http])[0]
    assert (result.text, result.token_ids) == ("", ())
    assert result.usage is not None
    assert result.usage.completion_tokens == sum(beam.num_tokens for beam in result.beams)
