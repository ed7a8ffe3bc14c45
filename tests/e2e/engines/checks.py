"""Checks of the whole system that hold for each engine behind the bus.

A module beside this one derives a class for its engine, and has a module-scoped fixture ``system``
that runs the demo model on it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import httpx
import openai
import pytest
from playwright.async_api import expect

from millrace.schemas.engines import PROMISES, EngineKind
from millrace.schemas.sampling import GrammarKind
from tests.e2e.clients import Answer, ask_sse, ask_websocket
from tests.e2e.schema_answers import check_schema_answer
from tests.gateway.page.windows import ask, ready
from tests.support.chromium import chromium
from tests.support.engine_servers import runs, server_process
from tests.support.system import System
from tests.support.waiting import eventually

QUESTION = "What is TTFT?"
_NUM_STREAMS = 20
_NUM_TOKENS = 150
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
            "required": ["town"],
        },
    },
}


class EngineAnswerChecks:
    """Checks that hold for every engine."""

    kind: ClassVar[EngineKind]

    async def test_the_openai_client_streams_a_sensible_answer(self, system: System) -> None:
        async with _client(system) as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert len(pieces) > 2, "it did not stream"
        assert "first token" in "".join(pieces).lower()

    async def test_a_stop_string_ends_an_answer(self, http: httpx.AsyncClient) -> None:
        whole = await ask_sse(http, QUESTION)
        stopped = await ask_sse(http, QUESTION, stop=[whole.text[10:14]])
        assert stopped.text == whole.text[: whole.text.index(whole.text[10:14])]
        assert stopped.finish_reason == "stop"

    async def test_a_websocket_gets_the_same_answer(
        self, system: System, http: httpx.AsyncClient
    ) -> None:
        over_sse = await ask_sse(http, QUESTION)
        over_socket = await ask_websocket(system.websocket, QUESTION)
        assert over_sse.text == over_socket.text

    @pytest.mark.browser
    async def test_what_it_cannot_do_is_refused_by_name(self, http: httpx.AsyncClient) -> None:
        card = (await http.get("/v1/models/demo")).json()["engine"]
        promises = PROMISES[self.kind]
        assert card["kind"] == self.kind
        assert card["exact_token_ids"] is promises.exact_token_ids
        assert card["takes_token_ids"] is promises.takes_token_ids
        assert card["unsupported"] == sorted(promises.unsupported)
        body = {"model": "demo", "prompt": "a", "max_tokens": 2}
        if "typical_p" in promises.unsupported:
            answer = await http.post("/v1/completions", json=body | {"typical_p": 0.5})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "typical_p"
        if GrammarKind.REGEX not in promises.grammars:
            answer = await http.post("/v1/completions", json=body | {"guided_regex": "a+"})
            assert answer.status_code == 400

    async def test_each_request_leaves_one_row_that_says_how_it_was_charged(
        self, system: System, http: httpx.AsyncClient
    ) -> None:
        answer = await ask_sse(http, QUESTION)

        def rows() -> list[dict[str, Any]]:
            return system.sql(
                "SELECT completion_tokens, device_us, cost_method, resampled FROM requests FINAL "
                f"WHERE request_id = '{answer.request_id}'"
            )

        await eventually(lambda: bool(rows()))
        [row] = rows()
        assert row["completion_tokens"] == answer.completion_tokens
        assert int(row["device_us"]) > 0
        assert row["cost_method"] == PROMISES[self.kind].cost_method
        assert not row["resampled"]


class EngineSystemChecks(EngineAnswerChecks):
    """Checks for engines that support grammars and whose server the worker starts.

    ``program`` is the name of the server's program.
    """

    program: ClassVar[str]

    async def test_the_openai_client_gets_the_call_that_it_demands(self, system: System) -> None:
        async with _client(system) as client:
            options: dict[str, Any] = {"tools": [_WEATHER], "tool_choice": "required"}
            whole = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "How is the weather in Ulm?"}],
                temperature=0,
                parallel_tool_calls=False,
                **options,
            )
        [call] = whole.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["town"] in ("Ulm", "Bonn")
        assert whole.choices[0].finish_reason == "tool_calls"

    async def test_the_openai_client_gets_what_its_schema_says(self, system: System) -> None:
        await check_schema_answer(system, QUESTION, longest=30, max_tokens=200)

    async def test_the_chat_page_shows_the_same_answer(
        self, system: System, http: httpx.AsyncClient
    ) -> None:
        over_sse = await ask_sse(http, QUESTION)
        async with chromium() as browser:
            page = await browser.new_page()
            await page.goto(system.http)
            await ready(page)
            await page.locator("#temperature").select_option("0")
            await ask(page, QUESTION)
            await expect(page.locator(".said")).to_contain_text(over_sse.text[:20])
            await expect(page.locator(".facts")).to_contain_text("tokens")

    async def test_all_streams_go_on_when_the_server_is_killed(
        self, system: System, http: httpx.AsyncClient
    ) -> None:
        undisturbed = await asyncio.gather(*self._streams(http))
        log = system.data / "logs" / "worker-1.log"
        num_replaced = _num_replaced(log.read_text())
        killed = server_process(system, self.program)
        tasks = self._streams(http)
        await eventually(lambda: self._num_running(system) >= 4, timeout_s=30.0)
        killed.kill()
        answers: list[Answer] = await asyncio.wait_for(asyncio.gather(*tasks), timeout=240.0)
        assert _num_replaced(log.read_text()) == num_replaced + 1
        assert [answer.completion_tokens for answer in answers] == [_NUM_TOKENS] * _NUM_STREAMS
        assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
        ids = ", ".join(f"'{answer.request_id}'" for answer in answers)

        def counted() -> dict[str, Any]:
            [row] = system.sql(
                "SELECT count() AS rows, uniqExact(request_id) AS ids FROM requests "
                f"WHERE request_id IN ({ids})"
            )
            return row

        await eventually(lambda: int(counted()["ids"]) == _NUM_STREAMS)
        assert int(counted()["rows"]) == _NUM_STREAMS

    async def test_nothing_of_the_server_outlives_its_worker(self, system: System) -> None:
        server = server_process(system, self.program)
        family = [server, *server.children(recursive=True)]
        system.kill("worker-1")
        await eventually(lambda: not any(runs(one) for one in family))
        log = system.data / "logs" / "worker-1.log"
        num_serving = log.read_text().count('"serving"')
        await eventually(lambda: log.read_text().count('"serving"') > num_serving, timeout_s=240.0)

    def _streams(self, http: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
        return [
            asyncio.ensure_future(
                ask_sse(http, f"{QUESTION} {number}", max_tokens=_NUM_TOKENS, ignore_eos=True)
            )
            for number in range(_NUM_STREAMS)
        ]

    @staticmethod
    def _num_running(system: System) -> int:
        rows = system.sql(
            "SELECT num_running FROM worker_samples FINAL ORDER BY sampled_at DESC LIMIT 1"
        )
        return int(rows[0]["num_running"]) if rows else 0


def _num_replaced(log: str) -> int:
    return log.count("a new engine runs")


def _client(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none")
