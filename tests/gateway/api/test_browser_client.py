"""The browser's client in Chromium, on a page of another origin, against a scripted gateway."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_gateway import ScriptedGateway, scripted_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

_QUICK = {"firstPauseMs": 10, "longestPauseMs": 50}
_IMPATIENT = {**_QUICK, "pingMs": 50, "pongWaitMs": 100}

# What a page keeps of an answer, for the tests to look at.
_SETUP = """
async ([url, token, timing]) => {
  const { Millrace } = await import(url + "/static/millrace.js");
  window.states = [];
  window.client = new Millrace({
    url, token, timing,
    onState: (state, { error }) => states.push(error ? `${state} ${error.code}` : state),
  });
  window.ask = (content, more = {}) => {
    const request = { model: "m", messages: [{ role: "user", content }], ...more };
    return watch(client.generate(request));
  };
  window.watch = (generation) => {
    window.answer = { text: "", types: [], calls: {}, result: null, error: null, generation };
    const { answer } = window;
    (async () => {
      for await (const event of generation) {
        answer.types.push(event.type);
        if (event.type === "delta") answer.text += event.text;
        if (event.type === "tool_call") answer.calls[event.call] = event.name + " ";
        if (event.type === "tool_arguments") answer.calls[event.call] += event.text;
      }
    })().catch(() => {});
    generation.done.then(
      (result) => (answer.result = result),
      ({ name, code, message, retryAfterS, param }) => (
        answer.error = { name, code, message, retryAfterS, param }
      ),
    );
  };
}
"""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.browser,
]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty page of another origin."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "index.html").write_text("<!doctype html><title>Elsewhere</title>")
    (folder / "favicon.ico").touch()
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing of what went well."""


@pytest_asyncio.fixture(loop_scope="module")
async def front() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, elsewhere: str) -> AsyncIterator[Page]:
    opened = await browser.new_page()
    opened.set_default_timeout(10_000)
    troubles: list[str] = []
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    await opened.goto(elsewhere)
    yield opened
    await opened.close()
    assert troubles == []


async def connect(
    page: Page, front: ScriptedGateway | RunningGateway, token: str = "", *, impatient: bool = False
) -> None:
    await page.evaluate(_SETUP, [front.url, token, _IMPATIENT if impatient else _QUICK])


async def result(page: Page) -> dict[str, Any]:
    await page.wait_for_function("answer.result || answer.error")
    found: dict[str, Any] = await page.evaluate("answer.result ?? answer.error")
    return found


async def has_text(page: Page, text: str) -> None:
    await page.wait_for_function("text => answer.text === text", arg=text)


async def test_an_answer_as_events_and_as_a_whole(page: Page, front: ScriptedGateway) -> None:
    await connect(page, front)
    await page.evaluate("ask('water')")
    whole = await result(page)
    assert whole["text"] == "water"
    assert whole["finishReason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["requestId"] == "chatcmpl-1"
    types = await page.evaluate("answer.types")
    assert types == ["accepted", "started", *["delta"] * 5, "done"]
    assert await page.evaluate("states") == ["open"]


async def test_a_lost_connection_is_resumed_at_the_token(
    page: Page, front: ScriptedGateway
) -> None:
    front.hold_before = 4
    await connect(page, front)
    await page.evaluate("ask('abcdefgh')")
    await has_text(page, "abcd")
    await front.part()
    await eventually(lambda: len(front.messages("resume")) == 1)
    await front.release()
    whole = await result(page)
    assert whole["text"] == "abcdefgh"
    assert await page.evaluate("answer.text") == "abcdefgh"
    # The last delta once more: what belongs to it may have been cut off.
    assert front.messages("resume")[0]["next_index"] == 3
    assert len(front.runs) == 1
    types = await page.evaluate("answer.types")
    assert types.index("interrupted") < types.index("resumed")
    assert await page.evaluate("states") == ["open", "lost", "open"]


@pytest.mark.parametrize("num_known", range(1, 6))
async def test_calls_are_resumed_wherever_they_were_cut(
    page: Page, front: ScriptedGateway, num_known: int
) -> None:
    call = {"type": "tool_call", "call": 0, "call_id": "call_1", "name": "clock"}
    front.script = lambda _request: [
        "Let me ",
        "look.",
        "",
        call,
        "",
        {"type": "tool_arguments", "call": 0, "text": '{"zone":'},
        "",
        {"type": "tool_arguments", "call": 0, "text": '"'},
        {"type": "tool_arguments", "call": 0, "text": 'utc"}'},
        "",
    ]
    front.hold_before = num_known
    await connect(page, front)
    await page.evaluate("ask('time?')")
    seen = "answer.types.filter(type => type === 'delta').length"
    await page.wait_for_function(f"{seen} === {num_known}")
    await front.part()
    await eventually(lambda: len(front.messages("resume")) == 1)
    await front.release()
    whole = await result(page)
    assert whole["text"] == "Let me look."
    expected = {"callId": "call_1", "name": "clock", "arguments": '{"zone":"utc"}'}
    assert whole["toolCalls"] == [expected]
    assert await page.evaluate("answer.calls") == {"0": 'clock {"zone":"utc"}'}


async def test_tokens_that_were_left_out_are_asked_for_again(
    page: Page, front: ScriptedGateway
) -> None:
    front.lose = {2, 5}
    await connect(page, front)
    await page.evaluate("ask('abcdefgh')")
    assert (await result(page))["text"] == "abcdefgh"
    assert await page.evaluate("answer.text") == "abcdefgh"


async def test_tokens_that_are_told_twice_are_passed_over(
    page: Page, front: ScriptedGateway
) -> None:
    front.overlap = 3
    front.hold_before = 5
    await connect(page, front)
    await page.evaluate("ask('abcdefgh')")
    await has_text(page, "abcde")
    await front.part()
    await eventually(lambda: len(front.messages("resume")) == 1)
    await front.release()
    assert (await result(page))["text"] == "abcdefgh"
    assert await page.evaluate("answer.text") == "abcdefgh"


async def test_a_generation_without_an_answer_yet_is_sent_again_and_runs_once(
    page: Page, front: ScriptedGateway
) -> None:
    front.mute = True
    await connect(page, front)
    await page.evaluate("ask('once')")
    await eventually(lambda: len(front.messages("generate")) == 1)
    front.mute = False
    await front.part()
    assert (await result(page))["text"] == "once"
    first, second = front.messages("generate")
    assert first["idempotency_key"] == second["idempotency_key"]
    assert len(first["idempotency_key"]) == 32
    assert len(front.runs) == 1


async def test_a_dead_connection_is_noticed(page: Page, front: ScriptedGateway) -> None:
    front.hold_before = 2
    await connect(page, front, impatient=True)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    front.mute = True
    await eventually(lambda: front.num_sockets >= 2)
    front.mute = False
    await front.release()
    assert (await result(page))["text"] == "abcd"


async def test_a_gateway_that_goes_away_hands_over_without_a_gap(
    page: Page, front: ScriptedGateway
) -> None:
    front.hold_before = 2
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    await front.say({"type": "going_away"})
    await eventually(lambda: len(front.messages("resume")) == 1)
    await front.release()
    assert (await result(page))["text"] == "abcd"
    assert "lost" not in await page.evaluate("states")
    await eventually(lambda: len(front.sockets) == 1)


async def test_a_request_that_came_too_late_goes_to_the_next_gateway(
    page: Page, front: ScriptedGateway
) -> None:
    front.refusal = {"code": "draining", "message": "Shutting down.", "retry_after_s": 1}
    await connect(page, front)
    await page.evaluate("ask('again')")
    assert (await result(page))["text"] == "again"
    assert front.num_sockets == 2


async def test_a_refusal_is_typed(page: Page, front: ScriptedGateway) -> None:
    front.refusal = {"code": "queue_full", "message": "Too much.", "retry_after_s": 2.5}
    await connect(page, front)
    await page.evaluate("ask('no')")
    assert await result(page) == {
        "name": "MillraceError",
        "code": "queue_full",
        "message": "Too much.",
        "retryAfterS": 2.5,
        "param": None,
    }


async def test_cancelling(page: Page, front: ScriptedGateway) -> None:
    front.hold_before = 2
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    await page.evaluate("answer.generation.cancel()")
    whole = await result(page)
    assert (whole["text"], whole["finishReason"]) == ("ab", "cancelled")


async def test_cancelling_while_away_reaches_the_gateway_later(
    page: Page, front: ScriptedGateway
) -> None:
    front.hold_before = 2
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    front.shut = True
    await front.part()
    await page.wait_for_function("states.at(-1) === 'lost'")
    await page.evaluate("answer.generation.cancel()")
    assert (await result(page))["finishReason"] == "cancelled"
    front.shut = False
    await eventually(lambda: front.runs["chatcmpl-1"].cancelled)


async def test_a_key_goes_in_the_first_message_only(page: Page, front: ScriptedGateway) -> None:
    front.token = "mr-good"
    await connect(page, front, "mr-bad")
    await page.wait_for_function("states.at(-1) === 'unauthorized invalid_api_key'")
    await page.evaluate("ask('hello')")
    await page.evaluate("client.token = 'mr-good'")
    assert (await result(page))["text"] == "hello"
    tokens = [message["token"] for message in front.messages("authenticate")]
    assert tokens == ["mr-bad", "mr-good"]


async def test_going_on_with_a_request_of_an_earlier_page(
    page: Page, front: ScriptedGateway
) -> None:
    front.hold_before = 2
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    await page.reload()
    await connect(page, front)
    await page.evaluate("watch(client.resume('chatcmpl-1'))")
    await front.release()
    assert (await result(page))["text"] == "abcd"


async def test_resuming_a_forgotten_request_is_an_error(page: Page, front: ScriptedGateway) -> None:
    await connect(page, front)
    await page.evaluate("watch(client.resume('chatcmpl-404', {nextIndex: 3}))")
    assert (await result(page))["code"] == "request_not_found"


async def test_closing_ends_everything(page: Page, front: ScriptedGateway) -> None:
    front.hold_before = 1
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "a")
    await page.evaluate("client.close()")
    assert (await result(page))["code"] == "closed"
    assert await page.evaluate("states.at(-1)") == "closed"
    await eventually(lambda: front.sockets == [])


async def test_a_resume_that_is_refused_for_now_is_tried_again(
    page: Page, front: ScriptedGateway
) -> None:
    front.hold_before = 2
    await connect(page, front)
    await page.evaluate("ask('abcd')")
    await has_text(page, "ab")
    front.refuse_resume = {
        "code": "state_unavailable",
        "message": "Away.",
        "retry_after_s": 0.01,
    }
    await front.part()
    await eventually(lambda: len(front.messages("resume")) == 2)
    await front.release()
    assert (await result(page))["text"] == "abcd"


async def test_a_missing_key_is_told_and_nothing_is_lost(
    page: Page, front: ScriptedGateway
) -> None:
    front.token = "mr-good"
    await connect(page, front)
    await page.evaluate("ask('hello')")
    await page.wait_for_function("states.at(-1) === 'unauthorized invalid_api_key'")
    await page.evaluate("client.token = 'mr-good'")
    assert (await result(page))["text"] == "hello"


async def test_without_a_store_of_keys_it_goes_without(page: Page, front: ScriptedGateway) -> None:
    front.refusal = {"code": "state_unavailable", "message": "Away.", "retry_after_s": 1}
    front.hold_before = 0
    await connect(page, front)
    await page.evaluate("ask('hello')")
    await eventually(lambda: len(front.messages("generate")) == 2)
    assert "idempotency_key" not in front.messages("generate")[1]
    await front.release()
    assert (await result(page))["text"] == "hello"


async def test_what_may_have_been_accepted_without_a_key_is_not_sent_again(
    page: Page, front: ScriptedGateway
) -> None:
    front.mute_after_refusal = True
    front.refusal = {"code": "state_unavailable", "message": "Away.", "retry_after_s": 1}
    await connect(page, front)
    await page.evaluate("ask('hello')")
    await eventually(lambda: len(front.messages("generate")) == 2)
    await front.part()
    failed = await result(page)
    assert (failed["code"], failed["retryAfterS"]) == ("connection_lost", 0)


async def test_a_real_gateway_serves_pages_of_an_origin_that_it_allows(
    page: Page, elsewhere: str, redis_server: RedisServer
) -> None:
    config = GatewayConfig(allowed_origins=(elsewhere.rstrip("/"),))
    redis = RedisConfig(url=redis_server.url)
    async with running_gateway(config, redis=redis) as front:
        front.worker.gate.clear()
        await connect(page, front)
        await page.evaluate("ask('water', {model: 'echo'})")
        await eventually(lambda: len(front.worker.jobs) == 1)
        front.close_connections()
        await page.wait_for_function("answer.types.includes('resumed')")
        front.worker.gate.set()
        whole = await result(page)
        assert whole["text"] == "water"
        assert len(front.worker.jobs) == 1
