"""Batches, as the openai client meets them, on the bus in memory and on a real one."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from bus import subjects
from bus.redis_link import RedisLink
from gateway.batch_store import BatchRecord, BatchStore
from schemas.config import GatewayConfig, RedisConfig
from tests.support.batch_system import (
    CHAT,
    BatchGateway,
    Connect,
    batch_gateway,
    batch_worker,
    chat_line,
    in_memory,
    on_nats,
)
from tests.support.batch_worker import BatchWorker
from tests.support.nats_streams import delete_streams
from tests.support.running_gateway import MODEL
from tests.support.servers import NatsServer, RedisServer
from tests.support.waiting import eventually


@pytest.fixture
async def redis(redis_server: RedisServer) -> RedisConfig:
    config = RedisConfig(url=redis_server.url)
    link = RedisLink(config)
    await link.call("FLUSHALL")
    await link.close()
    return config


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> NatsServer | None:
    """None for the bus in memory."""
    if request.param == "memory":
        return None
    started: NatsServer = request.getfixturevalue("nats_server")
    return started


@pytest.fixture
async def connect(server: NatsServer | None) -> Connect:
    if server is None:
        return in_memory()
    await delete_streams(server)
    return on_nats(server.url)


@pytest.fixture
async def worker(connect: Connect) -> AsyncIterator[BatchWorker]:
    async with batch_worker(connect) as made:
        yield made


@pytest.fixture
async def front(connect: Connect, redis: RedisConfig) -> AsyncIterator[BatchGateway]:
    async with batch_gateway(connect, redis) as made:
        yield made


def by_id(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found


class TestAnswers:
    async def test_every_request_is_answered_as_over_http(
        self, front: BatchGateway, worker: BatchWorker
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

    async def test_several_choices_and_prompts(
        self, front: BatchGateway, worker: BatchWorker
    ) -> None:
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

    async def test_embeddings(self, front: BatchGateway, worker: BatchWorker) -> None:
        body = {"model": MODEL, "input": ["ab", "c"], "encoding_format": "base64"}
        line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
        batch = await front.end(await front.begin([line], "/v1/embeddings"))
        (answer,) = await front.lines(batch.output_file_id)
        found = answer["response"]["body"]
        assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        assert [one["index"] for one in found["data"]] == [0, 1]
        assert len(base64.b64decode(found["data"][0]["embedding"])) % 4 == 0

    async def test_tool_calls_are_read(self, front: BatchGateway, worker: BatchWorker) -> None:
        call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
        tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
        batch = await front.end(await front.begin([chat_line("t", call, tools=[tool])]))
        (answer,) = await front.lines(batch.output_file_id)
        choice = answer["response"]["body"]["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        function = choice["message"]["tool_calls"][0]["function"]
        assert function["name"] == "clock"
        assert json.loads(function["arguments"]) == {"zone": "UTC"}

    async def test_what_cannot_be_honoured_is_in_the_error_file(
        self, front: BatchGateway, worker: BatchWorker
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
            {**chat_line("model", "hello"), "body": {"model": "nope", "messages": []}},
            chat_line("broken", "break"),
        ]
        batch = await front.end(await front.begin(lines))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (1, 8)
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
            "model": (400, "messages"),
            "broken": (500, None),
        }

    async def test_a_request_that_was_shed_is_asked_again(
        self, front: BatchGateway, worker: BatchWorker
    ) -> None:
        worker.shed = {"hello"}
        batch = await front.end(await front.begin([chat_line("c", "hello")]))
        (answer,) = await front.lines(batch.output_file_id)
        assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello"
        assert sorted(worker.answers) == [f"{batch.id}.1", f"{batch.id}.1-1"]

    async def test_an_answer_longer_than_an_entry_of_the_log(
        self, front: BatchGateway, worker: BatchWorker
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
        assert await bus.journal.names(subjects.ALL_OPEN_BATCHES) == []


class TestValidation:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b"{", ("invalid_json_line", 1, None)),
            (b"\n[1]\n", ("invalid_json_line", 2, None)),
            (b'{"custom_id": "a"}', ("invalid_parameter", 1, "method")),
            (json.dumps({**chat_line("a", "x"), "method": "GET"}), ("invalid_method", 1, "method")),
            (json.dumps({**chat_line("a", "x"), "url": "/v1/x"}), ("mismatched_url", 1, "url")),
            (json.dumps(chat_line("", "x")), ("invalid_custom_id", 1, "custom_id")),
            (
                "\n".join(json.dumps(chat_line(name, "x")) for name in "aba"),
                ("duplicate_custom_id", 3, "custom_id"),
            ),
            (b"  \n\n", ("empty_file", None, None)),
            (b"x" * 2_000, ("line_too_long", None, None)),
        ],
    )
    async def test_a_file_that_is_no_batch(
        self, redis: RedisConfig, data: bytes | str, expected: tuple[str, int | None, str | None]
    ) -> None:
        raw = data.encode() if isinstance(data, str) else data
        async with batch_gateway(in_memory(), redis, GatewayConfig(max_body_bytes=1_000)) as front:
            batch = await front.client.batches.create(
                input_file_id=await front.upload(raw), endpoint=CHAT, completion_window="24h"
            )
            batch = await front.end(batch)
            assert batch.status == "failed"
            assert batch.errors is not None
            assert batch.errors.data is not None
            (error,) = batch.errors.data
            assert (error.code, error.line, error.param) == expected
            assert batch.output_file_id is None
            with pytest.raises(openai.ConflictError, match="failed"):
                await front.client.batches.cancel(batch.id)

    async def test_too_many_lines(
        self, redis: RedisConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("gateway.batch_input.MAX_LINES", 3)
        async with batch_gateway(in_memory(), redis) as front:
            batch = await front.end(await front.begin([chat_line(c, "x") for c in "abcd"]))
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert [error.code for error in batch.errors.data] == ["too_many_lines"]

    async def test_what_is_refused_at_the_door(self, redis: RedisConfig) -> None:
        async with batch_gateway(in_memory(), redis) as front:
            file_id = await front.upload(b"{}")
            good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            url = f"http://127.0.0.1:{front.server.port}/v1/batches"
            async with httpx.AsyncClient() as http:
                for change, param in (
                    ({"endpoint": "/v1/images"}, "endpoint"),
                    ({"completion_window": "1h"}, "completion_window"),
                    ({"input_file_id": "file-nothing"}, "input_file_id"),
                    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
                    ({"metadata": {"k": "v" * 513}}, "metadata"),
                    ({"output_expires_after": {}}, "output_expires_after"),
                ):
                    answer = await http.post(url, json={**good, **change})
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == param
                assert (await http.get(f"{url}/batch_none")).status_code == 404
                assert (await http.post(f"{url}/batch_none/cancel")).status_code == 404
                assert (await http.get(url, params={"limit": "101"})).status_code == 400

    async def test_without_redis_there_are_none(self) -> None:
        async with batch_gateway(in_memory(), None) as front:
            with pytest.raises(openai.InternalServerError, match="away"):
                await front.begin([chat_line("a", "x")])


class TestLife:
    async def test_listed_newest_first_in_pages(self, redis: RedisConfig) -> None:
        connect = in_memory()
        async with batch_gateway(connect, redis) as front, batch_worker(connect):
            made = [await front.begin([chat_line("a", "x")]) for _ in range(5)]
            newest_first = [batch.id for batch in reversed(made)]
            page = await front.client.batches.list(limit=2)
            assert [batch.id for batch in page.data] == newest_first[:2]
            assert page.has_more
            found = [batch.id async for batch in front.client.batches.list(limit=2)]
            assert found == newest_first
            await front.end(made[-1])

    async def test_cancelled_in_the_middle(self, front: BatchGateway, worker: BatchWorker) -> None:
        batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(300)])
        worker.hold_after = 20
        await eventually(lambda: worker.num_running >= 100)
        cancelling = await front.client.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        assert (await front.client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await front.end(batch)
        assert batch.status == "cancelled"
        counts = batch.request_counts
        assert counts is not None
        assert counts.completed == 20
        assert counts.failed == 280
        answered = by_id(await front.lines(batch.output_file_id))
        not_run = by_id(await front.lines(batch.error_file_id))
        assert len(answered) == 20
        assert not answered.keys() & not_run.keys()
        assert {line["error"]["code"] for line in not_run.values()} == {"batch_cancelled"}
        assert {line["response"] is None for line in not_run.values()} == {True}
        await eventually(lambda: worker.num_running == 0)

    async def test_cancelled_before_anybody_has_looked_at_it(self, redis: RedisConfig) -> None:
        connect = in_memory()
        config = GatewayConfig(max_batches_at_once=0)
        async with batch_gateway(connect, redis, config) as idle:
            good = await idle.begin([chat_line("a", "x"), chat_line("b", "x")])
            bad = await idle.begin([{"nothing": "good"}])
            for batch in (good, bad):
                assert (await idle.client.batches.cancel(batch.id)).status == "cancelling"
            async with batch_gateway(connect, redis) as front:
                good, bad = await front.end(good), await front.end(bad)
                assert (good.status, bad.status) == ("cancelled", "failed")
                not_run = await front.lines(good.error_file_id)
                assert [line["custom_id"] for line in not_run] == ["a", "b"]

    async def test_the_window_ends(self, front: BatchGateway, worker: BatchWorker) -> None:
        worker.hold_after = 2
        batch = await front.begin([chat_line(f"c{number}", "hi") for number in range(5)])
        await eventually(lambda: worker.num_running == 3)
        store = BatchStore(front.gateway.bus.journal)

        def over(record: BatchRecord) -> BatchRecord:
            return replace(record, batch=replace(record.batch, expires_at=1))

        await store.change("local", batch.id, over)
        batch = await front.end(batch)
        assert batch.status == "expired"
        assert len(await front.lines(batch.output_file_id)) == 2
        not_run = await front.lines(batch.error_file_id)
        assert [line["error"]["code"] for line in not_run] == ["batch_expired"] * 3

    async def test_a_file_in_use_stays(self, front: BatchGateway, worker: BatchWorker) -> None:
        worker.gate.clear()
        batch = await front.begin([chat_line("a", "x")])
        with pytest.raises(openai.ConflictError, match=batch.id):
            await front.client.files.delete(batch.input_file_id)
        worker.gate.set()
        await front.end(batch)
        assert (await front.client.files.delete(batch.input_file_id)).deleted


class TestTakeover:
    async def test_each_line_once_though_its_gateway_dies(
        self, connect: Connect, redis: RedisConfig, worker: BatchWorker
    ) -> None:
        num_lines = 300
        lines = [chat_line(f"c{number}", f"hello {number}") for number in range(num_lines)]
        async with batch_gateway(connect, redis) as first:
            worker.hold_after = 100
            batch = await first.begin(lines)
            await eventually(lambda: worker.num_running >= 100)
            await first.die()
            async with batch_gateway(connect, redis) as second:
                worker.release()
                batch = await second.end(batch)
                assert batch.status == "completed"
                answers = by_id(await second.lines(batch.output_file_id))
                assert set(answers) == {line["custom_id"] for line in lines}
        assert Counter(worker.answers.values()) == {1: num_lines}

    async def test_a_gateway_that_goes_down_in_order_hands_it_over_at_once(
        self, connect: Connect, redis: RedisConfig, worker: BatchWorker
    ) -> None:
        lines = [chat_line(f"c{number}", f"hello {number}") for number in range(50)]
        async with batch_gateway(connect, redis) as first:
            worker.hold_after = 10
            batch = await first.begin(lines)
            await eventually(lambda: worker.num_running == 40)
        async with batch_gateway(connect, redis) as second:
            worker.release()
            batch = await second.end(batch)
            assert len(by_id(await second.lines(batch.output_file_id))) == 50
        assert Counter(worker.answers.values()) == {1: 50}
