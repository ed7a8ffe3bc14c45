"""Answers of a batch, read with the openai client."""

from __future__ import annotations

import base64
import json

import pytest

from millrace.bus import subjects
from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.support.batches.batch_system import (
    BatchGateway,
    Connect,
    batch_gateway,
    by_id,
    chat_line,
)
from tests.support.batches.batch_worker import BatchWorker
from tests.support.running_gateway import MODEL


async def test_every_request_is_answered_as_over_http(
    front: BatchGateway, worker: BatchWorker
) -> None:
    lines = [chat_line(f"c{number}", f"Grüße {number}") for number in range(30)]
    batch = await front.begin(lines)
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = await front.end(batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert batch.error_file_id is None
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is not None
    answers = by_id(await front.lines(batch.output_file_id))
    assert set(answers) == {f"c{number}" for number in range(30)}
    answer = answers["c7"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    over_http = await front.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Grüße 7"}]
    )
    expected = json.loads(over_http.text)
    body = answer["response"]["body"]
    assert body["id"] == answer["response"]["request_id"]
    different = ("id", "created")
    assert {k: v for k, v in body.items() if k not in different} == {
        k: v for k, v in expected.items() if k not in different
    }
    assert all(count == 1 for count in worker.answers.values())
    assert {job.tier for job in worker.jobs if job.store_result} == {"batch"}


async def test_several_choices_and_prompts(front: BatchGateway, worker: BatchWorker) -> None:
    line = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 2},
    }
    batch = await front.end(await front.begin([line], "/v1/completions"))
    (answer,) = await front.lines(batch.output_file_id)
    choices = answer["response"]["body"]["choices"]
    assert [(one["index"], one["text"]) for one in choices] == [
        (0, "on"),
        (1, "on"),
        (2, "tw"),
        (3, "tw"),
    ]
    assert answer["response"]["body"]["usage"]["prompt_tokens"] == 6
    assert sorted(worker.answers) == [
        f"{batch.id}.1",
        f"{batch.id}.1.1",
        f"{batch.id}.1.2",
        f"{batch.id}.1.3",
    ]


async def test_jobs_have_priority_and_salt_of_their_lines(
    front: BatchGateway, worker: BatchWorker
) -> None:
    body = {"model": MODEL, "input": ["ab", "c"], "priority": 4}
    embeddings = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    await front.end(await front.begin([embeddings], "/v1/embeddings"))
    await front.end(await front.begin([chat_line("c", "hello", priority=-4, cache_salt="mine")]))
    options = [(job.priority, job.cache_salt) for job in worker.jobs]
    assert options == [(4, ""), (4, ""), (-4, "mine")]


async def test_the_field_of_a_grammar_that_does_not_compile_is_named(
    front: BatchGateway, worker: BatchWorker
) -> None:
    worker.fail, worker.fail_code = {"break"}, "grammar_invalid"
    batch = await front.end(await front.begin([chat_line("a", "break", guided_regex="(a")]))
    (line,) = await front.lines(batch.error_file_id)
    assert line["response"]["body"]["error"]["param"] == "guided_regex"


async def test_a_beam_search_is_one_job(front: BatchGateway, worker: BatchWorker) -> None:
    line = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {
            "model": MODEL,
            "prompt": ["one", "three"],
            "n": 2,
            "use_beam_search": True,
            "return_token_ids": True,
        },
    }
    batch = await front.end(await front.begin([line], "/v1/completions"))
    (answer,) = await front.lines(batch.output_file_id)
    body = answer["response"]["body"]
    assert [(one["index"], one["text"]) for one in body["choices"]] == [
        (0, "one"),
        (1, "on"),
        (2, "three"),
        (3, "thre"),
    ]
    # They were too many to be kept.
    assert [one["token_ids"] for one in body["choices"]] == [None] * 4
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 3 + 2 + 5 + 4)
    assert sorted(worker.answers) == [f"{batch.id}.1", f"{batch.id}.1.1"]


async def test_embeddings(front: BatchGateway, worker: BatchWorker) -> None:
    body = {"model": MODEL, "input": ["ab", "c"], "encoding_format": "base64"}
    line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    batch = await front.end(await front.begin([line], "/v1/embeddings"))
    (answer,) = await front.lines(batch.output_file_id)
    found = answer["response"]["body"]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert len(base64.b64decode(found["data"][0]["embedding"])) % 4 == 0


async def test_tool_calls_are_read(front: BatchGateway, worker: BatchWorker) -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    batch = await front.end(await front.begin([chat_line("t", call, tools=[tool])]))
    (answer,) = await front.lines(batch.output_file_id)
    choice = answer["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "clock"
    assert json.loads(function["arguments"]) == {"zone": "UTC"}


async def test_what_calls_are_not_held_to_is_said(front: BatchGateway, worker: BatchWorker) -> None:
    parameters = {"properties": {"zone": {"type": "string", "pattern": "^(?!x)"}}}
    tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    line = chat_line("t", "hello", tools=[tool], tool_choice="required")
    (answer,) = await front.lines((await front.end(await front.begin([line]))).output_file_id)
    (notice,) = answer["response"]["body"]["x-millrace-notice"]
    assert notice["detail"] == "clock.properties.zone.pattern"


async def test_strict_calls_that_nothing_holds_are_checked_behind(
    front: BatchGateway, worker: BatchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.registry.requests.ready_jobs.can_hold_calls", lambda _kind: False)
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": 7}}\n</tool_call>'
    parameters = {"properties": {"zone": {"type": "string"}}}
    function = {"name": "clock", "parameters": parameters, "strict": True}
    tool = {"type": "function", "function": function}
    line = chat_line("t", call, tools=[tool], parallel_tool_calls=False)
    (answer,) = await front.lines((await front.end(await front.begin([line]))).output_file_id)
    notices = answer["response"]["body"]["x-millrace-notice"]
    assert [one["code"] for one in notices] == ["strict_not_enforced", "strict_violated"]
    assert notices[1]["detail"] == "clock: $.zone: 7 is not of type 'string'"


async def test_what_cannot_be_honoured_is_in_the_error_file(
    front: BatchGateway, worker: BatchWorker
) -> None:
    worker.fail = {"break"}
    lines = [
        chat_line("good", "hello"),
        chat_line("stream", "hello", stream=True),
        chat_line("session", "hello", session_id="s"),
        chat_line("tools", "hello", server_tools=["clock"]),
        chat_line("tier", "hello", service_tier="priority"),
        chat_line("field", "hello", colour="red"),
        chat_line("hot", "hello", temperature=99),
        chat_line("template", "hello", chat_template="> "),
        {**chat_line("model", "hello"), "body": {"model": "nope", "messages": []}},
        chat_line("broken", "break"),
    ]
    batch = await front.end(await front.begin(lines))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (1, 9)
    assert set(by_id(await front.lines(batch.output_file_id))) == {"good"}
    errors = by_id(await front.lines(batch.error_file_id))
    found = {
        name: (line["response"]["status_code"], line["response"]["body"]["error"]["param"])
        for name, line in errors.items()
    }
    assert found == {
        "stream": (400, "stream"),
        "session": (400, "session_id"),
        "tools": (400, "server_tools"),
        "tier": (400, "service_tier"),
        "field": (400, "colour"),
        "hot": (400, "temperature"),
        "template": (400, "chat_template"),
        "model": (400, "messages"),
        "broken": (500, None),
    }


async def test_a_template_of_a_line_where_that_is_allowed(
    connect: Connect, redis: RedisConfig, worker: BatchWorker
) -> None:
    config = GatewayConfig(trust_request_chat_template=True)
    async with batch_gateway(connect, redis, config) as front:
        line = chat_line("c", "hello", chat_template="> ")
        batch = await front.end(await front.begin([line]))
        (answer,) = await front.lines(batch.output_file_id)
    (choice,) = answer["response"]["body"]["choices"]
    assert choice["message"]["content"] == "> hello"


async def test_a_request_that_was_shed_is_asked_again(
    front: BatchGateway, worker: BatchWorker
) -> None:
    worker.shed = {"hello"}
    batch = await front.end(await front.begin([chat_line("c", "hello")]))
    (answer,) = await front.lines(batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert sorted(worker.answers) == [f"{batch.id}.1", f"{batch.id}.1-1"]


async def test_an_answer_longer_than_an_entry_of_the_log(
    front: BatchGateway, worker: BatchWorker
) -> None:
    worker.script = lambda _job: ["ü" * 1_000] * 200
    lines = [chat_line(f"c{number}", "x") for number in range(3)]
    batch = await front.end(await front.begin(lines))
    answers = await front.lines(batch.output_file_id)
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in answers]
    assert texts == ["ü" * 200_000] * 3
    bus = front.gateway.bus
    assert await bus.objects.names(batch.id) == []
    assert await bus.journal.names(subjects.batch_log(batch.id)) == []
    assert await bus.journal.names(subjects.open_batch()) == []


async def test_token_ids_and_those_of_prompts_are_told(
    front: BatchGateway, worker: BatchWorker
) -> None:
    body = {"model": MODEL, "prompt": ["abc", "de"], "n": 2, "return_token_ids": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batch = await front.end(await front.begin([line], "/v1/completions"))
    (answer,) = await front.lines(batch.output_file_id)
    choices = answer["response"]["body"]["choices"]
    tokens = [(bytes(one["prompt_token_ids"]), len(one["token_ids"])) for one in choices]
    assert tokens == [(b"abc", 3), (b"abc", 3), (b"de", 2), (b"de", 2)]
