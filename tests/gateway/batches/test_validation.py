"""Batches that are refused, and files that are none."""

from __future__ import annotations

import codecs
import json

import httpx
import openai
import pytest

from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.support.batches.batch_system import (
    CHAT,
    batch_gateway,
    batch_worker,
    chat_line,
    in_memory,
)


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
    redis: RedisConfig, data: bytes | str, expected: tuple[str, int | None, str | None]
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


async def test_a_file_may_begin_with_the_mark_of_its_encoding(redis: RedisConfig) -> None:
    connect = in_memory()
    async with batch_gateway(connect, redis) as front, batch_worker(connect):
        lines = [codecs.BOM_UTF8 + json.dumps(chat_line("a", "x")).encode(), b""]
        batch = await front.client.batches.create(
            input_file_id=await front.upload(b"\n".join(lines)),
            endpoint=CHAT,
            completion_window="24h",
        )
        batch = await front.end(batch)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_too_many_lines(redis: RedisConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.gateway.batches.input.MAX_LINES", 3)
    async with batch_gateway(in_memory(), redis) as front:
        batch = await front.end(await front.begin([chat_line(c, "x") for c in "abcd"]))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["too_many_lines"]


async def test_what_is_refused_at_the_door(redis: RedisConfig) -> None:
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


async def test_without_redis_batches_are_refused() -> None:
    async with batch_gateway(in_memory(), None) as front:
        with pytest.raises(openai.InternalServerError, match="unreachable"):
            await front.begin([chat_line("a", "x")])
