"""Event streams that outlive their gateway."""

from __future__ import annotations

import httpx

from tests.gateway.resuming.clients import CHAT, PATH, TAKES_EVENTS, TEXT, Events, Pair, slow


async def test_an_event_stream_goes_on_after_its_gateway_died(pair: Pair) -> None:
    dripping = await slow(pair.worker)
    events = Events()
    async with (
        httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http,
        http.stream("POST", PATH, json=CHAT, headers=TAKES_EVENTS) as response,
    ):
        async for line in response.aiter_lines():
            events.take(line)
            if len(events.text) >= 6:
                break
        await pair.kill_first()
    dripping.cancel()
    pair.worker.gate.set()
    async with (
        httpx.AsyncClient(base_url=pair.second.url, timeout=10) as http,
        http.stream("POST", PATH, json=CHAT, headers={"Last-Event-ID": events.last_id}) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            events.take(line)
    assert (events.text, events.done) == (TEXT, True)
    assert len(pair.worker.jobs) == 1


async def test_a_last_event_id_that_is_none(pair: Pair) -> None:
    async with httpx.AsyncClient(base_url=pair.first.url, timeout=10) as http:
        bad = await http.post(PATH, json=CHAT, headers={"Last-Event-ID": "nonsense"})
        whole = await http.post(
            PATH, json=CHAT | {"stream": False}, headers={"Last-Event-ID": "chatcmpl-0/1"}
        )
        unknown = await http.post(PATH, json=CHAT, headers={"Last-Event-ID": "chatcmpl-0/1"})
    assert [bad.status_code, whole.status_code, unknown.status_code] == [400, 400, 404]
    assert bad.json()["error"]["param"] == "last-event-id"
