"""Files, as the openai client and others meet them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.store.objects import StoredObject
from millrace.gateway.batches.files import Files, created_ms, new_ordered_id
from millrace.schemas.batches.batches import FilePurpose
from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import RunningGateway, running_gateway

LIMIT_BYTES = 300_000


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    async with running_gateway(GatewayConfig(max_file_bytes=LIMIT_BYTES)) as running:
        yield running


def form(**changed: object) -> dict[str, object]:
    """A good upload with some of its fields changed."""
    return {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}, **changed}


async def test_a_file_comes_back_as_it_was(client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) * 1_100
    file = await client.files.create(file=("größe.jsonl", data), purpose="batch")
    assert file.id.startswith("file-")
    assert (file.object, file.filename, file.purpose) == ("file", "größe.jsonl", "batch")
    assert (file.bytes, file.status) == (len(data), "processed")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == data


async def test_listed_in_pages_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=b"{}", purpose="batch")).id for _ in range(5)]
    assert [file.id for file in (await client.files.list()).data] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2, after=made[3])
    assert ([file.id for file in page.data], page.has_more) == ([made[2], made[1]], True)
    assert (await client.files.list(purpose="batch")).data
    assert not (await client.files.list(purpose="batch_output")).data
    deleted = await client.files.delete(made[2])
    assert (deleted.id, deleted.deleted) == (made[2], True)
    for call in (client.files.delete, client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError, match="no file"):
            await call(made[2])
    assert made[2] not in [file.id for file in (await client.files.list()).data]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "up"}, "order"),
        ({"before": "x"}, "before"),
    ],
)
async def test_a_list_that_is_asked_for_wrongly(
    http: httpx.AsyncClient, query: dict[str, str], param: str
) -> None:
    answer = await http.get("/v1/files", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("upload", "param"),
    [
        (form(data={"purpose": "fine-tune"}), "purpose"),
        (form(data={}), "purpose"),
        (form(data={"purpose": "batch", "expires_after[seconds]": "9"}), "expires_after[seconds]"),
        (form(files={"file": ("a.jsonl", b"")}), "file"),
        (form(files={"file": ("x" * 257, b"{}")}), "file"),
        (form(files={"data": ("a.jsonl", b"{}")}), "data"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"x": b""}}, "x"),
        ({"files": [("file", ("a", b"{}")), ("file", ("b", b"{}"))]}, "file"),
        ({"content": b"{}", "headers": {"content-type": "application/json"}}, "content-type"),
        ({"content": b"{}", "headers": {"content-type": "multipart/form-data"}}, "file"),
        (
            {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
            "file",
        ),
    ],
)
async def test_a_form_that_is_refused(
    http: httpx.AsyncClient, upload: dict[str, object], param: str
) -> None:
    answer = await http.post("/v1/files", **upload)  # type: ignore[arg-type]
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert (await http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("charset", "filename"),
    [("undefined", "a"), ("idna", "xn--a-"), ("utf-7", "+2AA-"), ("unicode_escape", "\\ud800")],
)
async def test_names_in_a_charset_that_makes_no_text_of_them(
    http: httpx.AsyncClient, charset: str, filename: str
) -> None:
    file = (
        f'--x\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n{{}}\r\n'
    )
    purpose = '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    kind = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    answer = await http.post("/v1/files", content=(file + purpose).encode(), headers=kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("content-type", "purpose", "file")
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_file_that_is_too_large(http: httpx.AsyncClient, front: RunningGateway) -> None:
    too_large = form(files={"file": ("a.jsonl", bytes(LIMIT_BYTES * 2))})
    whole = http.build_request("POST", "/v1/files", **too_large)  # type: ignore[arg-type]
    body = await whole.aread()

    async def undeclared() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    declared = await http.send(whole)
    kind = {"content-type": whole.headers["content-type"]}
    streamed = await http.post("/v1/files", content=undeclared(), headers=kind)
    just_over = {"file": ("a.jsonl", bytes(LIMIT_BYTES + 1))}
    slightly = await http.post("/v1/files", **form(files=just_over))  # type: ignore[arg-type]
    for answer in (declared, streamed, slightly):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "payload_too_large"
        assert str(LIMIT_BYTES) in answer.json()["error"]["message"]
    assert str(LIMIT_BYTES + 1) in slightly.json()["error"]["message"]
    journal = front.broker.journal
    assert await journal.names("files.entry.*.*") == await journal.names("files.chunks.*") == []
    assert (await http.post("/v1/files", **form())).status_code == 200  # type: ignore[arg-type]


async def test_more_than_a_tenant_may_keep() -> None:
    config = GatewayConfig(max_stored_file_bytes=10)
    async with (
        running_gateway(config) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        first = await http.post("/v1/files", **form(files={"file": ("a", b"x" * 8)}))  # type: ignore[arg-type]
        refused = await http.post("/v1/files", **form(files={"file": ("b", b"x" * 3)}))  # type: ignore[arg-type]
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "storage_limit_exceeded"
        await http.delete(f"/v1/files/{first.json()['id']}")
        again = await http.post("/v1/files", **form(files={"file": ("b", b"x" * 3)}))  # type: ignore[arg-type]
        assert again.status_code == 200


async def test_more_files_than_a_tenant_may_keep() -> None:
    async with (
        running_gateway(GatewayConfig(max_stored_files=2)) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        answers = [await http.post("/v1/files", **form()) for _ in range(3)]  # type: ignore[arg-type]
        assert [answer.status_code for answer in answers] == [200, 200, 413]
        assert answers[2].json()["error"]["code"] == "storage_limit_exceeded"


async def test_uploads_at_the_same_time_do_not_pass_the_limit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        running_gateway(GatewayConfig(max_stored_file_bytes=10)) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        objects, both_found_room = running.gateway.bus.objects, asyncio.Barrier(2)
        put = objects.put

        async def put_together(*args: Any, **named: Any) -> StoredObject:
            await both_found_room.wait()
            return await put(*args, **named)

        monkeypatch.setattr(objects, "put", put_together)
        upload = form(files={"file": ("a", b"x" * 6)})
        answers = await asyncio.gather(
            *(http.post("/v1/files", **upload) for _ in range(2))  # type: ignore[arg-type]
        )
        num_stored = sum(answer.status_code == 200 for answer in answers)
        assert num_stored <= 1
        assert {answer.status_code for answer in answers} <= {200, 413}
        assert len((await http.get("/v1/files")).json()["data"]) == num_stored


async def test_a_client_that_leaves_in_the_middle(front: RunningGateway) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"
        b"content-type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=front.url) as http:
        assert (await http.post("/v1/files", **form())).status_code == 200  # type: ignore[arg-type]


async def test_while_the_bus_is_away(http: httpx.AsyncClient, front: RunningGateway) -> None:
    front.broker.stop()
    answer = await http.post("/v1/files", **form())  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "bus_unavailable")
    assert (await http.get("/v1/files")).status_code == 503
    front.broker.start()
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_each_tenant_has_its_own() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"{}"

    files = Files(MemoryBus(MemoryBroker()).objects)
    await files.put("acme", "file-1", content(), "a", FilePurpose.BATCH)
    assert await files.ids("acme") == ["file-1"]
    assert await files.ids("other") == []
    with pytest.raises(Exception, match="no file"):
        await files.get("other", "file-1")
    with pytest.raises(Exception, match="no file"):
        await files.delete("other", "file-1")


def test_ids_sort_by_time() -> None:
    now_ns = 1_700_000_000_123_000_000
    ids = [new_ordered_id("file-", now_ns + step * 1_000_000) for step in range(50)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 50
    assert created_ms(ids[0]) == 1_700_000_000_123
