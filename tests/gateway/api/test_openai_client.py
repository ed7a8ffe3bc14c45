"""OpenAI's own client against the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import openai
import pytest

from millrace.gateway.api import answers
from millrace.gateway.api.answers import HttpClient
from millrace.schemas.config import GatewayConfig
from millrace.schemas.control import QueueStatus
from millrace.schemas.frames import Delta, Expired, Failed, Frame, Shed
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway
from tests.support.waiting import eventually

_HELLO: Any = [{"role": "user", "content": "Grüße, world"}]


@pytest.mark.parametrize(
    "headers", [{}, {"Accept": "text/event-stream"}], ids=["data only", "with ids"]
)
async def test_silence_within_a_stream_is_broken(
    front: RunningGateway,
    client: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
) -> None:
    """Keep-alives are skipped by the client, with and without event ids."""
    waited, num_silences = HttpClient.wait_up_to, 0
    texts: list[str] = []

    async def wait_up_to(http_client: HttpClient, timeout_s: float) -> bool:
        nonlocal num_silences
        has_happened = await waited(http_client, timeout_s)
        num_silences += bool(texts) and not has_happened
        return has_happened

    async def read() -> None:
        stream = await client.chat.completions.create(
            model=MODEL, messages=_HELLO, stream=True, extra_headers=headers
        )
        async for chunk in stream:
            content = chunk.choices[0].delta.content
            texts.append(content or "")

    monkeypatch.setattr(HttpClient, "wait_up_to", wait_up_to)
    monkeypatch.setattr(answers, "_KEEP_ALIVE_S", 0.01)
    front.worker.script = lambda _job: [f"{number} " for number in range(100)]
    front.worker.gate.clear()
    reading = asyncio.create_task(read())
    while not (any(texts) or reading.done()):
        front.worker.gate.set()
        await asyncio.sleep(0)
        front.worker.gate.clear()
        await asyncio.sleep(0.005)
    await eventually(lambda: num_silences >= 4 or reading.done())
    front.worker.gate.set()
    await reading
    assert "".join(texts) == "".join(f"{number} " for number in range(100))


async def test_a_chat_is_answered(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=_HELLO)
    assert answer.choices[0].message.content == "Grüße, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 12)
    assert answer.usage.total_tokens == 26


async def test_a_chat_is_streamed(client: openai.AsyncOpenAI) -> None:
    text, reasons, usages = "", [], []
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=_HELLO,
        stream=True,
        max_tokens=5,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == "Grüße"
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == 5
    assert set(usages[:-1]) == {None}


async def test_a_completion_is_answered_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="again and again, for ever")
    assert whole.choices[0].text == "again and again,"
    assert whole.choices[0].finish_reason == "length"
    stream = await client.completions.create(model=MODEL, prompt=[104, 105], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hi"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("absent")


async def test_an_unknown_model_is_a_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="absent", messages=_HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.type == "invalid_request_error"


async def test_a_context_that_is_too_long_says_both_numbers(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="x" * 4_090, max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    assert "4090" in str(caught.value)
    assert "maximum context length is 4096 tokens" in str(caught.value)


async def test_a_bad_parameter_is_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="x", n=17)
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[7, 70_000])
    assert caught.value.param == "prompt[1]"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[[7], [7, 70_000]])
    assert caught.value.param == "prompt[1][1]"
    assert "prompt[1][1] is not in the vocabulary" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=21
        )
    assert caught.value.param == "top_logprobs"


async def test_sampling_options_reach_the_worker(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    own = {
        "repetition_penalty": 1.2,
        "typical_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "min_tokens": 2,
        "bad_words": ["mill"],
    }
    await client.chat.completions.create(
        model=MODEL,
        messages=_HELLO,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": -100},
        extra_body=own,
    )
    (job,) = front.worker.jobs
    taken = msgspec.structs.asdict(job.sampling)
    common = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {65: -100.0}}
    wanted = own | common | {"bad_words": ("mill",)}
    assert {name: taken[name] for name in wanted} == wanted


async def test_a_full_queue_is_a_429(front: RunningGateway, client: openai.AsyncOpenAI) -> None:
    full = QueueStatus(model=MODEL, num_queued=9, bound=9, retry_after_s=2.5)
    await front.worker.bus.control.publish_queue_status(full)
    await eventually(lambda: bool(front.gateway.fleet.queues()))
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model=MODEL, prompt="x")
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "3"
    assert front.worker.jobs == []


async def test_jobs_that_services_published_fill_no_queue(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    waiting = QueueStatus(model=MODEL, num_queued=9_000, num_published=8_992, bound=9)
    await front.worker.bus.control.publish_queue_status(waiting)
    await eventually(lambda: bool(front.gateway.fleet.queues()))
    assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "x"


async def test_a_bus_that_is_away_is_a_503(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.broker.stop()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=MODEL, prompt="x")
    assert (caught.value.status_code, caught.value.code) == (503, "bus_unavailable")
    front.broker.start()
    assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "x"


async def test_an_outage_of_the_bus_leaves_no_hole(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    """Frames sent while the bus was unreachable are requested again and come once."""
    sent: list[int] = []

    def lose_some(frame: Frame) -> bool:
        if isinstance(frame, Delta):
            sent.append(frame.index)
            if frame.index == 10:
                front.broker.stop()
            elif frame.index == 30:
                front.broker.start()
        return False

    front.worker.lose = lose_some
    text = "0123456789" * 5
    stream = await client.completions.create(
        model=MODEL, prompt=text, max_tokens=50, stream=True, timeout=20
    )
    got = "".join([chunk.choices[0].text async for chunk in stream])
    assert got == text
    assert sent == list(range(50))
    assert front.worker.replays


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("frame", "status", "code"),
    [
        (Shed(retry_after_s=4), 429, "overloaded"),
        (Shed(retry_after_s=4, code="queue_full"), 429, "queue_full"),
        (Expired(), 504, "deadline_exceeded"),
        (Failed(code="worker_failed", message="it broke", retryable=True), 503, "worker_failed"),
        (Failed(code="context_length_exceeded", message="x"), 400, "context_length_exceeded"),
    ],
)
async def test_an_end_before_any_token_has_its_status(
    front: RunningGateway,
    client: openai.AsyncOpenAI,
    frame: Failed,
    status: int,
    code: str,
    stream: bool,
) -> None:
    front.worker.end_with = frame
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model=MODEL, messages=_HELLO, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    await eventually(lambda: len(front.gateway.streams) == 0)


async def test_a_failure_inside_a_stream_is_an_error_event(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.stop_before = 3
    front.worker.end_with = Failed(code="worker_failed", message="it broke")
    stream = await client.chat.completions.create(model=MODEL, messages=_HELLO, stream=True)
    text = ""
    error: openai.APIError | None = None
    try:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as caught:
        error = caught
    assert text == "Grü"
    assert error is not None
    assert (error.code, error.message) == ("worker_failed", "it broke")


async def test_a_bug_is_a_500_in_openais_shape(
    front: RunningGateway, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ByteModel, "prepare", broken)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=MODEL, prompt="x")
    assert (caught.value.status_code, caught.value.code) == (500, "internal_error")
    assert "bug" not in caught.value.message


async def test_a_request_without_an_end_times_out() -> None:
    async with running_gateway(GatewayConfig(request_timeout_s=0.2)) as front:
        front.worker.stop_before = 2
        async with openai.AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.completions.create(model=MODEL, prompt="slow")
        assert (caught.value.status_code, caught.value.code) == (504, "request_timeout")
        await eventually(lambda: len(front.worker.cancelled) == 1)
        await eventually(lambda: len(front.gateway.streams) == 0)
