"""Several choices, several prompts, echoes and log-probabilities, by the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from millrace.schemas.frames import Failed
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway
from tests.support.waiting import eventually


async def test_choices_are_jobs_of_their_own(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.script = lambda job: str(job.sampling.seed)
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, seed=40
    )
    assert [choice.message.content for choice in answer.choices] == ["40", "41", "42"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    ids = [job.request_id for job in front.worker.jobs]
    assert sorted(ids) == [answer.id, f"{answer.id}.1", f"{answer.id}.2"]
    parts = {job.part.choice: job.part for job in front.worker.jobs if job.part is not None}
    assert [parts[number].shares_prompt for number in range(3)] == [False, True, True]
    assert {part.request_id for part in parts.values()} == {answer.id}
    assert len(front.gateway.streams) == 0


async def test_choices_are_streamed_side_by_side(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    front.worker.script = lambda job: f"<{job.sampling.seed}>"
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], ["", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert (texts, reasons) == (["<7>", "<8>"], ["stop", "stop"])
    assert usage is not None
    assert usage.completion_tokens == 6


async def test_one_failing_choice_ends_them_all(front: RunningGateway) -> None:
    front.worker.end_with = Failed(code="engine_killed", message="It is dead.")
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_killed")
    await eventually(lambda: len(front.gateway.streams) == 0)


async def test_several_prompts(front: RunningGateway, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, best_of=2, echo=True, max_tokens=8
    )
    assert [choice.text for choice in answer.choices] == ["oneone", "oneone", "twotwo", "twotwo"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    ids = await client.completions.create(model=MODEL, prompt=[[104, 105], [106]], echo=True)
    assert [choice.text for choice in ids.choices] == ["hihi", "jj"]


async def test_chat_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.token for one in logprobs.content] == ["\x00", "\x01"]
    assert logprobs.content[1].bytes == [1]
    assert [one.logprob for one in logprobs.content[0].top_logprobs] == [-0.5, -1.5]
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, stream=True
    )
    streamed = [
        token.token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or []
    ]
    assert streamed == ["\x00", "\x01"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_the_end_token_has_no_log_probability(
    front: RunningGateway, route: str, *, stream: bool
) -> None:
    """The end token counts in usage and is not part of the content."""
    model = await front.gateway.models.get(MODEL)
    assert isinstance(model, ByteModel)
    model.eos_token_ids = (2,)
    front.worker.script = lambda _job: ["h", "i", ""]
    is_chat = "chat" in route
    fields = {"messages": [{"role": "user", "content": "?"}]} if is_chat else {"prompt": "?"}
    body = {"model": MODEL, "logprobs": True if is_chat else 1, "stream": stream, **fields}
    async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
        answers = await _answers(http, route, body)
        found = [answer["choices"][0]["logprobs"] for answer in answers]
        lists = [one["content"] if is_chat else one["tokens"] for one in found if one]
        tokens = [one["token"] if is_chat else one for tokens in lists for one in tokens]
        assert tokens == ["\x00", "\x01"]
        if not stream:
            assert answers[0]["usage"]["completion_tokens"] == 3
        ignored = await _answers(http, route, {**body, "ignore_eos": True, "stream": False})
        logprobs = ignored[0]["choices"][0]["logprobs"]
        assert len(logprobs["content" if is_chat else "tokens"]) == 3


async def _answers(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> list[Any]:
    """Return the body, or the bodies of all events."""
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line.startswith("{")]


async def test_completion_log_probabilities_with_the_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=1)
    lists = answer.choices[0].logprobs
    assert lists is not None
    assert lists.tokens == ["a", "b", "c", "\x00", "\x01", "\x02"]
    assert lists.token_logprobs is not None
    assert [*lists.token_logprobs] == [None, *[-0.5] * 5]
    assert lists.text_offset == [0, 1, 2, 3, 4, 5]
    stream = await client.completions.create(
        model=MODEL, prompt="abc", echo=True, logprobs=1, stream=True
    )
    text, tokens = "", []
    async for chunk in stream:
        text += chunk.choices[0].text
        found = chunk.choices[0].logprobs
        tokens += [] if found is None else found.tokens or []
    assert (text, tokens) == ("abcabc", lists.tokens)


async def test_log_probabilities_that_do_not_go_together(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], top_logprobs=2
        )
    assert caught.value.param == "top_logprobs"
