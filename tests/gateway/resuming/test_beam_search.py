"""A beam search that is read again: by its key, at another gateway, and over a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.gateway.resuming.clients import CHAT, PATH, TEXT, Pair, opened, send, until
from tests.support.waiting import eventually

_BODY = CHAT | {"stream": False, "use_beam_search": True, "n": 3, "return_token_ids": True}


def texts(answer: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


async def test_one_search_for_one_key(pair: Pair) -> None:
    headers = {"Idempotency-Key": "k-1"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        first = await http.post(PATH, json=_BODY, headers=headers)
        assert texts(first) == [TEXT, TEXT + "!", TEXT + "!!"]
        again = await http.post(PATH, json=_BODY, headers=headers)
        elsewhere = await other.post(PATH, json=_BODY, headers=headers)
        pair.worker.forget(first.json()["id"])
        stored = await other.post(PATH, json=_BODY, headers=headers)
    for answer in (again, elsewhere, stored):
        assert answer.json() == first.json()
    assert len(pair.worker.jobs) == 1


async def test_two_simultaneous_clients_read_one_search(pair: Pair) -> None:
    pair.worker.gate.clear()
    headers = {"Idempotency-Key": "k-2"}
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as other,
    ):
        asked = asyncio.create_task(http.post(PATH, json=_BODY, headers=headers))
        await eventually(lambda: len(pair.worker.jobs) == 1)
        beside = asyncio.create_task(other.post(PATH, json=_BODY, headers=headers))
        await eventually(lambda: len(pair.second.gateway.streams) + len(pair.worker.replays) > 0)
        pair.worker.gate.set()
        answers = await asyncio.gather(asked, beside)
    assert texts(answers[0]) == texts(answers[1]) == [TEXT, TEXT + "!", TEXT + "!!"]
    assert len(pair.worker.jobs) == 1


async def test_a_search_whose_gateway_died_goes_on_at_another(pair: Pair) -> None:
    """The search is answered whole; an answer that the client has is not sent again."""
    pair.worker.gate.clear()
    request_id = ""
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        asked = asyncio.create_task(http.post(PATH, json=_BODY, headers={"Idempotency-Key": "k-3"}))
        await eventually(lambda: len(pair.worker.jobs) == 1)
        request_id = pair.worker.jobs[0].request_id
        await pair.kill_first()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    async with opened(pair.second) as socket:
        wanted: dict[str, Any] = {"request_id": request_id, "next_index": [5, 0, 0]}
        await send(socket, "resume", id="b", **wanted)
        await until(socket, "accepted")
        pair.worker.gate.set()
        messages = await until(socket, "done")
    deltas = [(one["choice"], one["text"]) for one in messages if one["type"] == "delta"]
    assert deltas == [(1, TEXT + "!"), (2, TEXT + "!!")]
    assert messages[-1]["usage"]["completion_tokens"] == 3 * len(TEXT) + 3
    await eventually(lambda: len(pair.second.gateway.streams) == 0)
