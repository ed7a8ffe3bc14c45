"""The disk of ``millrace up`` is filled to its last page under streams, and has room again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.clients import Answer, ask_sse, ask_websocket
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="fills a whole system's disk; the gateway and sink tests fill each store alone"
    ),
    pytest.mark.timeout(240),
]

_NUM_STREAMS = 16
_CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
_WITHIN_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_mib=420) as mounted:
        yield mounted


@pytest.fixture
def small_system(disk: SmallDisk) -> Iterator[System]:
    system = System(disk.path, arguments=("--port", "0", "--engine", "simulated")).start()
    yield system
    system.stop()


async def _keep_full(disk: SmallDisk, stopped: asyncio.Event) -> None:
    """Keep the disk full, including space that stores free meanwhile."""
    while not stopped.is_set():
        await asyncio.to_thread(disk.fill)
        await asyncio.sleep(0.01)


async def test_a_full_disk_loses_no_stream_or_record_and_the_system_recovers(
    disk: SmallDisk, small_system: System
) -> None:
    system, stopped = small_system, asyncio.Event()
    async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:

        async def health() -> str:
            return str((await http.get("/healthz")).json()["status"])

        async def is_refused() -> bool:
            return await health() == "storage_full"

        streams = [
            asyncio.create_task(
                ask_websocket(system.websocket, f"Long {i}", max_tokens=400, ignore_eos=True)
                if i % 2
                else ask_sse(http, f"Long {i}", max_tokens=400, ignore_eos=True)
            )
            for i in range(_NUM_STREAMS)
        ]

        async def all_run() -> bool:
            return bool((await http.get("/healthz")).json()["open_streams"] >= _NUM_STREAMS)

        await eventually(all_run, _WITHIN_S)
        filling = asyncio.create_task(_keep_full(disk, stopped))
        try:
            await eventually(is_refused, _WITHIN_S, "health names a store without room")
            for refused in await asyncio.gather(*(_ask(http) for _ in range(8))):
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    503,
                    "storage_full",
                )
            assert "nats" in (await http.get("/healthz")).json()["stores"]
            # Tokens travel on no disk: the streams go on to their ends.
            answers: list[Answer] = await asyncio.wait_for(asyncio.gather(*streams), _WITHIN_S)
        finally:
            stopped.set()
            await filling
        assert [answer.completion_tokens for answer in answers] == [400] * _NUM_STREAMS
        assert len({answer.request_id for answer in answers}) == _NUM_STREAMS
        disk.make_room()

        async def is_well() -> bool:
            return await health() == "ok" and (await _ask(http)).status_code == 200

        await eventually(is_well, _WITHIN_S, "requests are accepted again")

    async def recorded() -> bool:
        ids = ", ".join(f"'{answer.request_id}'" for answer in answers)
        rows = system.sql(f"SELECT request_id FROM requests FINAL WHERE request_id IN ({ids})")
        return Counter(row["request_id"] for row in rows) == Counter(
            answer.request_id for answer in answers
        )

    await eventually(recorded, _WITHIN_S, "each request has its record, once")
    # Without that, it would have taken nothing for ever.
    assert "there is room now; starting it again" in system.output()


async def _ask(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=_CHAT)
