"""System with a prefill and a decode worker: a stream continues with the blocks of the other.

It continues after either worker is killed, and when a worker drains.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace.cli.main import main
from tests.e2e.clients import Answer, ask_sse
from tests.support.scraped import Scraped
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="over a minute of long prompts; the workers' tests move blocks between two of them"
    ),
]

_LONG = "What is a KV cache? " * 150
_MAX_TOKENS = 400


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--workers", "prefill:1,decode:1")
    running = System(tmp_path_factory.mktemp("apart"), arguments=arguments).start()
    yield running
    assert running.stop() == 0


async def _ask(http: httpx.AsyncClient, number: int) -> Answer:
    """Long prompts of which none begins as another, half of them drawn."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    return await ask_sse(
        http, f"{number} {_LONG}", max_tokens=_MAX_TOKENS, ignore_eos=True, **drawn
    )


async def _busy(http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    """Streams that a long prompt would hold up."""
    tasks = [
        asyncio.create_task(ask_sse(http, "What is TTFT?", max_tokens=1_500, ignore_eos=True))
        for _ in range(3)
    ]

    async def all_run() -> bool:
        return bool((await http.get("/healthz")).json()["open_streams"] >= len(tasks))

    await eventually(all_run)
    return tasks


async def _texts(http: httpx.AsyncClient, first: int, count: int) -> list[str]:
    answers = await asyncio.gather(*(_ask(http, first + number) for number in range(count)))
    assert [answer.completion_tokens for answer in answers] == [_MAX_TOKENS] * count
    return [answer.text for answer in answers]


async def _num_pulled_moves(system: System, http: httpx.AsyncClient) -> float:
    """Streams that went on with blocks of another worker, as the scheduler counted."""
    targets = json.loads((system.data / "run" / "metrics-targets.json").read_text())
    (address,) = [t["targets"][0] for t in targets if t["labels"]["part"] == "scheduler"]
    scraped = Scraped((await http.get(f"http://{address}/metrics")).text)
    return scraped.value("millrace_scheduler_moves_total", model="demo", source="pulled")


def _records_of_pulls(system: System) -> list[dict[str, Any]]:
    """Return the rows of requests that pulled from the worker of an earlier attempt."""
    return system.sql(
        "SELECT worker, kv_source, pulled_tokens, pulls.pulled_tokens AS attempts, "
        "prompt_tokens, completion_tokens "
        "FROM requests FINAL WHERE pulled_tokens > 0 AND has(lives.worker, kv_source)"
    )


async def test_streams_go_on_behind_prompts_that_another_has_computed(apart: System) -> None:
    async with httpx.AsyncClient(base_url=apart.http, timeout=60.0) as http:
        # The decode worker is idle, so it computes each prompt itself.
        alone = [text for number in range(4) for text in await _texts(http, number, 1)]
        busy = await _busy(http)
        assert await _texts(http, 0, 4) == alone
        fresh = await _texts(http, 100, 4)
        await asyncio.gather(*busy)
        assert await _texts(http, 100, 4) == fresh
        # The eight that came while others decoded, unless those had ended before the last of them.
        assert await _num_pulled_moves(apart, http) >= 4
    await eventually(lambda: len(_records_of_pulls(apart)) >= 4, what="rows of what was pulled")
    for record in _records_of_pulls(apart):
        assert record["kv_source"] != record["worker"]
        assert record["pulled_tokens"] < record["prompt_tokens"] + record["completion_tokens"]
        assert sum(record["attempts"]) == record["pulled_tokens"]


@pytest.mark.parametrize("name", ["worker-1", "worker-2"])
async def test_streams_go_on_when_either_side_is_killed(apart: System, name: str) -> None:
    async with httpx.AsyncClient(base_url=apart.http, timeout=60.0) as http:
        first = 200 if name == "worker-1" else 300
        busy = await _busy(http)
        asked = asyncio.create_task(_texts(http, first, 6))
        await asyncio.sleep(0)

        async def has_more() -> bool:
            return bool((await http.get("/healthz")).json()["open_streams"] > len(busy))

        await eventually(has_more)
        killed = apart.kill(name)
        texts = await asyncio.wait_for(asked, 90.0)
        await asyncio.gather(*busy)
        await eventually(lambda: apart.pid(name) != killed)
        assert await _texts(http, first, 6) == texts


async def test_a_drained_worker_becomes_empty_and_no_token_changes(
    apart: System, capsys: pytest.CaptureFixture[str]
) -> None:
    async with httpx.AsyncClient(base_url=apart.http, timeout=60.0) as http:
        asked = [
            asyncio.create_task(ask_sse(http, f"{n} {_LONG}", max_tokens=900, ignore_eos=True))
            for n in range(400, 404)
        ]

        async def all_run() -> bool:
            return bool((await http.get("/healthz")).json()["open_streams"] >= len(asked))

        await eventually(all_run)
        arguments = ["workers", "drain", "worker-2", "--data", str(apart.data)]
        assert await asyncio.to_thread(main, arguments) == 0
        assert "worker-2 is empty" in capsys.readouterr().out
        texts = [answer.text for answer in await asyncio.gather(*asked)]
        again = await asyncio.gather(
            *(
                ask_sse(http, f"{n} {_LONG}", max_tokens=900, ignore_eos=True)
                for n in range(400, 404)
            )
        )
        assert [answer.text for answer in again] == texts
