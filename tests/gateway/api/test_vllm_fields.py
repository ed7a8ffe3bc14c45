"""Fields of vLLM's servers that clients send through ``extra_body`` and by plain HTTP."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from millrace.schemas.config import GatewayConfig
from tests.gateway.resuming.clients import opened, send, until
from tests.support.running_gateway import MODEL, ByteModel, RunningGateway, running_gateway

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one. two"}]}


@pytest.mark.parametrize("stop_reason", [".", 7, None])
async def test_what_stopped_a_choice_is_told(
    front: RunningGateway,
    client: openai.AsyncOpenAI,
    http: httpx.AsyncClient,
    stop_reason: str | int | None,
) -> None:
    front.worker.stop_reason = stop_reason
    chat = await client.chat.completions.create(**_CHAT)
    text = await client.completions.create(model=MODEL, prompt="x")
    for choice in (*chat.choices, *text.choices):
        assert choice.model_extra == {"stop_reason": stop_reason}
    for path, body in (
        ("chat/completions", _CHAT),
        ("completions", {"model": MODEL, "prompt": "x"}),
    ):
        answer = await http.post(f"/v1/{path}", json=body | {"stream": True})
        choices = [
            json.loads(line.removeprefix("data: "))["choices"][0]
            for line in answer.text.splitlines()
            if line.startswith("data: {")
        ]
        *before, last = choices
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop_reason)
        assert not any("stop_reason" in choice for choice in before)


async def test_how_text_is_made_reaches_the_worker(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    fields = {
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "allowed_token_ids": [104, 105],
    }
    await client.chat.completions.create(**_CHAT, stop=["."], extra_body=fields)
    await client.chat.completions.create(**_CHAT)
    asked, plain = (job.sampling for job in front.worker.jobs)
    assert (asked.include_stop_str_in_output, asked.skip_special_tokens) == (True, False)
    assert (asked.allowed_token_ids, plain.allowed_token_ids) == ((104, 105), ())
    assert (plain.include_stop_str_in_output, plain.skip_special_tokens) == (False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 1),
        ("spaces_between_special_tokens", "no"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1] * 20_000),
        ("allowed_token_ids", "1"),
        ("cache_salt", ""),
        ("cache_salt", "s" * 300),
        ("seed", -(2**63)),
    ],
)
async def test_a_value_that_means_nothing_is_refused_by_name(
    client: openai.AsyncOpenAI, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**_CHAT, extra_body={field: value})
    assert (refused.value.param or "").startswith(field)


async def test_negative_seeds_are_seeds_but_for_the_one_that_leaves_it_to_us(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    for seed in (-7, -7, -8, 1 - 2**63, -1, -1):
        await client.chat.completions.create(**_CHAT, seed=seed)
    first, again, other, least, *ours = (job.sampling.seed for job in front.worker.jobs)
    assert first == again
    assert len({first, other, least, *ours}) == 5


async def test_a_salt_goes_with_every_job_of_a_request(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    await client.chat.completions.create(**_CHAT, n=2, extra_body={"cache_salt": "mine"})
    await client.completions.create(
        model=MODEL, prompt=["x", "y"], extra_body={"cache_salt": "theirs"}
    )
    await client.chat.completions.create(**_CHAT)
    salts = [job.cache_salt for job in front.worker.jobs]
    assert sorted(salts) == ["", "mine", "mine", "theirs", "theirs"]


async def test_an_answer_is_not_begun_for_the_model_if_asked_so(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    for fields in ({"add_generation_prompt": False}, {"add_generation_prompt": True}, {}):
        await client.chat.completions.create(**_CHAT, extra_body=fields)
    begun = [job.add_generation_prompt for job in front.worker.jobs]
    assert begun == [False, True, True]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            **_CHAT, extra_body={"add_generation_prompt": False, "server_tools": ["clock"]}
        )
    assert refused.value.param == "add_generation_prompt"


async def test_an_answer_goes_on_with_the_last_message(
    front: RunningGateway, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    messages: list[Any] = [*_CHAT["messages"], {"role": "assistant", "content": "It is"}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    await http.post("/v1/chat/completions", json=body)
    await client.chat.completions.create(model=MODEL, messages=messages)
    assert [job.continue_final_message for job in front.worker.jobs] == [True, False]
    assert (await http.post("/tokenize", json=body)).json()["count"] == len("It is")


@pytest.mark.parametrize(
    "fields",
    [
        {"add_generation_prompt": True},
        {"server_tools": ["clock"]},
        {"session_id": "s"},
    ],
)
async def test_what_does_not_go_with_a_last_message_to_go_on_with(
    client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            **_CHAT, extra_body={"continue_final_message": True} | fields
        )
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize("n", [1, 2])
async def test_what_stopped_an_answer_is_told_over_a_socket(front: RunningGateway, n: int) -> None:
    front.worker.stop_reason = "."
    async with opened(front) as socket:
        await send(socket, "generate", id="a", **_CHAT, n=n)
        messages = await until(socket, "done")
    ends = [one for one in messages if one["type"] in ("choice_done", "done")]
    assert [one["stop_reason"] for one in ends] == ["."] * (1 if n == 1 else 3)


async def test_log_probabilities_of_a_chats_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**_CHAT, extra_body={"prompt_logprobs": 1})
    assert answer.model_extra is not None
    first, *others = answer.model_extra["prompt_logprobs"]
    assert first is None
    content = _CHAT["messages"][0]["content"][1:]
    tokens = [place[str(ord(c))]["decoded_token"] for place, c in zip(others, content, strict=True)]
    assert "".join(tokens) == content
    assert [[entry["rank"] for entry in place.values()] for place in others] == [
        [ord(c)] for c in content
    ]
    plain = await client.chat.completions.create(**_CHAT)
    assert "prompt_logprobs" not in (plain.model_extra or {})


async def test_log_probabilities_of_each_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=["abc", "de"], extra_body={"prompt_logprobs": 0}
    )
    logprobs = [(choice.model_extra or {})["prompt_logprobs"] for choice in answer.choices]
    assert [[list(place or {}) for place in one] for one in logprobs] == [
        [[], ["98"], ["99"]],
        [[], ["101"]],
    ]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"stream": True, "prompt_logprobs": 1}),
        ("chat/completions", {"prompt_logprobs": -1}),
        ("completions", {"echo": True, "logprobs": 2, "prompt_logprobs": 1}),
        ("responses", {"prompt_logprobs": 1}),
    ],
)
async def test_log_probabilities_that_are_not_told(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    asked = {
        "chat/completions": _CHAT,
        "completions": {"model": MODEL, "prompt": "x"},
        "responses": {"model": MODEL, "input": "x"},
    }[path]
    refused = await http.post(f"/v1/{path}", json=asked | fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_a_prompt_alone(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": ["abc", "de"], "max_tokens": 0, "echo": True}
    answer = await client.completions.create(**asked, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["abc", "de"]
    tokens = [choice.logprobs.tokens for choice in answer.choices if choice.logprobs is not None]
    assert tokens == [["a", "b", "c"], ["d", "e"]]
    text = ["", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.text
    assert text == ["abc", "de"]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt="abc", max_tokens=0)
    assert refused.value.param == "max_tokens"


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"n": 2}, {"tools": [TOOL]}])
async def test_token_ids_of_a_chat(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    """Whole and streamed they are the same, wherever the text is held back meanwhile."""
    text = f"Look. {CALL}"
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "return_token_ids": True,
    } | fields
    expected = [list(range(len(text)))] * fields.get("n", 1)  # the stand-in numbers its tokens
    whole = (await http.post("/v1/chat/completions", json=asked)).json()
    assert bytes(whole["prompt_token_ids"]) == text.encode()
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    answer = await http.post("/v1/chat/completions", json=asked | {"stream": True})
    first, *chunks = chunks_of(answer.text)
    assert bytes(first["prompt_token_ids"]) == text.encode()
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    ids: list[list[int]] = [[] for _ in expected]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids[choice["index"]] += choice.get("token_ids", [])
    assert ids == expected


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}])
async def test_token_ids_of_completions(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": ["abc", "de"], "return_token_ids": True} | fields
    whole = (await http.post("/v1/completions", json=asked)).json()
    assert [bytes(choice["prompt_token_ids"]) for choice in whole["choices"]] == [b"abc", b"de"]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1, 2], [0, 1]]
    answer = await http.post("/v1/completions", json=asked | {"stream": True})
    prompts: list[list[int]] = [[], []]
    ids: list[list[int]] = [[], []]
    for choice in (choice for chunk in chunks_of(answer.text) for choice in chunk["choices"]):
        prompts[choice["index"]] += choice.get("prompt_token_ids", [])
        ids[choice["index"]] += choice.get("token_ids", [])
    assert [bytes(prompt) for prompt in prompts] == [b"abc", b"de"]
    assert ids == [[0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("path", "body", "num_jobs"),
    [
        ("chat/completions", _CHAT | {"n": 2}, 2),
        ("completions", {"model": MODEL, "prompt": ["ab", "cd"]}, 2),
        ("embeddings", {"model": MODEL, "input": ["ab", "cd"]}, 2),
    ],
)
async def test_each_prompt_is_truncated(
    front: RunningGateway, http: httpx.AsyncClient, path: str, body: dict[str, Any], num_jobs: int
) -> None:
    answer = await http.post(f"/v1/{path}", json=body | {"truncate_prompt_tokens": 1})
    assert answer.status_code == 200
    assert [len(job.prompt_token_ids or ()) for job in front.worker.jobs] == [1] * num_jobs


_NEUTRAL: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "chat_template": None,
    "documents": [],
}


async def test_what_vllms_clients_send_that_asks_for_nothing(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**_CHAT, extra_body=_NEUTRAL)
    assert answer.choices[0].message.content == "one. two"


@pytest.mark.parametrize(
    "field", ["use_beam_search", "length_penalty", "chat_template", "documents"]
)
async def test_what_is_not_honoured_of_vllms_fields(client: openai.AsyncOpenAI, field: str) -> None:
    asks: Any = {"chat_template": "{{ messages }}", "documents": [{"text": "x"}]}.get(field, 3)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**_CHAT, extra_body={field: asks})
    assert refused.value.param == field


_TEMPLATE = {"chat_template": "> "}


async def test_a_request_brings_its_own_template_where_that_is_allowed() -> None:
    """Every API with messages accepts the template; other APIs refuse it."""
    async with (
        running_gateway(GatewayConfig(trust_request_chat_template=True)) as front,
        openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        answer = await client.chat.completions.create(**_CHAT, extra_body=_TEMPLATE)
        assert answer.choices[0].message.content == "> one. two"
        result = (await http.post("/v1/tokenize", json=_CHAT | _TEMPLATE)).json()
        assert bytes(result["tokens"]) == b"> one. two"
        for body, param in (
            (_CHAT | _TEMPLATE | {"session_id": "s"}, "chat_template"),
            (_CHAT | {"chat_template": 3}, "chat_template"),
        ):
            refused = await http.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        async with opened(front) as socket:
            await send(socket, "generate", id="a", **_CHAT, **_TEMPLATE)
            messages = await until(socket, "done")
            text = "".join(one["text"] for one in messages if one["type"] == "delta")
            assert text == "> one. two"
        texts = {"model": MODEL, "prompt": "x"} | _TEMPLATE
        for path in ("completions", "tokenize"):
            refused = await http.post(f"/v1/{path}", json=texts)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


async def test_a_template_of_a_request_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the request is: what it does may take any time."""
    threads: list[int] = []
    with_template = ByteModel.with_chat_template

    def noted(model: ByteModel, source: str) -> ByteModel:
        threads.append(threading.get_ident())
        return with_template(model, source)

    monkeypatch.setattr(ByteModel, "with_chat_template", noted)
    async with (
        running_gateway(GatewayConfig(trust_request_chat_template=True)) as front,
        httpx.AsyncClient(base_url=front.url, timeout=10) as http,
    ):
        for path in ("chat/completions", "tokenize"):
            assert (await http.post(f"/v1/{path}", json=_CHAT | _TEMPLATE)).status_code == 200
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_template_of_a_request_is_not_trusted_otherwise(
    front: RunningGateway, http: httpx.AsyncClient
) -> None:
    for path in ("chat/completions", "tokenize"):
        refused = await http.post(f"/v1/{path}", json=_CHAT | _TEMPLATE)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "chat_template")
        assert "trust_request_chat_template" in error["message"]
    assert not front.worker.jobs


async def test_metadata_goes_with_every_job_and_too_much_is_refused_by_name(
    front: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    noted = {"project": "mill", "": "x" * 512}
    await client.chat.completions.create(**_CHAT, n=2, metadata=noted)
    await client.completions.create(model=MODEL, prompt=["x"], extra_body={"metadata": noted})
    await client.responses.create(model=MODEL, input="x", metadata=noted)
    assert [job.metadata for job in front.worker.jobs] == [noted] * 4
    for bad in (
        {str(number): "" for number in range(17)},
        {"k" * 65: ""},
        {"k": "v" * 513},
        {"k": 1},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**_CHAT, extra_body={"metadata": bad})
        assert "metadata" in str(refused.value)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model=MODEL, input="x", extra_body={"metadata": bad})
        assert "metadata" in str(refused.value)
    assert len(front.worker.jobs) == 4
