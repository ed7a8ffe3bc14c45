"""Compressed bodies: each endpoint reads them, and none becomes larger than a body may be."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from backports import zstd

from millrace.schemas.config import GatewayConfig
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway

_LIMIT_BYTES = 8 * 1024 * 1024
_PROMPT = {"model": MODEL, "prompt": "hello"}
_BODY = json.dumps(_PROMPT).encode()
_GZIPPED = gzip.compress(_BODY, mtime=0)  # the same in every process
_JSON = {"content-type": "application/json"}


def raw_deflate(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


_CODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
    ("identity", bytes),
    ("gzip, zstd", lambda data: zstd.compress(gzip.compress(data))),
    ("deflate, gzip, identity", lambda data: gzip.compress(raw_deflate(data))),
    ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
    ("zstd", lambda data: zstd.compress(data[:9]) + zstd.compress(data[9:])),
]


@pytest.fixture
async def front() -> AsyncIterator[RunningGateway]:
    config = GatewayConfig(max_body_bytes=_LIMIT_BYTES, max_file_bytes=_LIMIT_BYTES)
    async with running_gateway(config) as running:
        yield running


@pytest.fixture
async def http(front: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.url, timeout=20.0, headers=_JSON) as client:
        yield client


async def pieces_of(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(("coding", "encode"), _CODINGS)
async def test_a_compressed_body_is_read(
    http: httpx.AsyncClient, coding: str, encode: Callable[[bytes], bytes]
) -> None:
    data = encode(_BODY)
    headers = {"content-encoding": coding}
    for content in (data, pieces_of(data, 1), pieces_of(data, 7)):
        answer = await http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/tokenize", {"prompt": "hello"}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
async def test_every_endpoint_reads_compressed_bodies(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    data = zstd.compress(json.dumps({"model": MODEL, **body}).encode())
    answer = await http.post(path, content=data, headers={"content-encoding": "zstd"})
    assert answer.status_code == 200, answer.text


async def test_a_form_may_be_compressed(http: httpx.AsyncClient) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": _PROMPT}
    content = json.dumps(line).encode() + b"\n" * 1_000_000
    form = httpx.Request(
        "POST", "http://a/", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}
    )
    headers = {"content-type": form.headers["content-type"], "content-encoding": "gzip"}
    data = gzip.compress(form.read())
    answer = await http.post("/v1/files", content=data, headers=headers)
    assert answer.status_code == 200, answer.text
    kept = await http.get(f"/v1/files/{answer.json()['id']}/content")
    assert kept.content == content
    cut = await http.post("/v1/files", content=data[:-9], headers=headers)
    assert code_of(cut) == (400, "invalid_content_encoding")
    large = gzip.compress(form.read().replace(b"\n" * 1_000, b"\n" * 20_000))
    answer = await http.post("/v1/files", content=large, headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/batches"])
async def test_other_codings_are_refused_with_those_that_are_taken(
    http: httpx.AsyncClient, path: str
) -> None:
    for coding in ("br", "compress", "gzip, br", "aes128gcm", "x" * 3_000, "gzip," * 4 + "gzip"):
        headers = {"content-encoding": coding}
        answer = await http.post(path, content=_BODY, headers=headers)
        assert code_of(answer) == (415, "unsupported_content_encoding")
        assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert answer.json()["error"]["param"] == "content-encoding"
        assert len(answer.content) < 600


@pytest.mark.parametrize(
    ("coding", "data", "why"),
    [
        ("gzip", _BODY, "is not valid gzip"),
        ("zstd", _BODY, "is not valid zstd"),
        ("deflate", b"\x78\x9c" + _BODY, "is not valid deflate"),
        ("zstd", _GZIPPED, "is not valid zstd"),
        ("gzip", _GZIPPED[:-1], "ends before its gzip data does"),
        ("gzip", _GZIPPED[:-12], "ends before its gzip data does"),
        ("deflate", zlib.compress(_BODY)[:-4], "ends before its deflate data does"),
        ("deflate", b"\x78", "ends before its deflate data does"),
        ("zstd", zstd.compress(_BODY)[:-1], "ends before its zstd data does"),
        ("gzip", _GZIPPED[:-8] + b"12345678", "is not valid gzip"),
        ("gzip", _GZIPPED + b"more", "is not valid gzip"),
        ("deflate", zlib.compress(_BODY) + b"more", "has data after the end"),
        ("gzip, zstd", zstd.compress(_BODY), "is not valid gzip"),
        (
            "gzip, zstd",
            zstd.compress(_GZIPPED[:-1]),
            "before its gzip data does",
        ),
    ],
)
async def test_a_body_that_is_not_what_it_says_is_told(
    http: httpx.AsyncClient, coding: str, data: bytes, why: str
) -> None:
    headers = {"content-encoding": coding}
    for content in (data, pieces_of(data, 3)):
        answer = await http.post("/v1/completions", content=content, headers=headers)
        assert code_of(answer) == (400, "invalid_content_encoding")
        assert why in answer.json()["error"]["message"]
    assert (await http.post("/v1/completions", content=_BODY)).status_code == 200


async def test_a_frame_with_a_large_window_is_refused(http: httpx.AsyncClient) -> None:
    options: dict[int, int] = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    data = compressor.compress(_BODY) + compressor.flush()
    answer = await http.post("/v1/completions", content=data, headers={"content-encoding": "zstd"})
    assert code_of(answer) == (400, "invalid_content_encoding")
    assert "too much memory" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(b" " * 200_000_000, compresslevel=1)),
        ("zstd", zstd.compress(b" " * 200_000_000)),
        ("deflate, zstd", zstd.compress(zlib.compress(b" " * 200_000_000, level=1))),
    ],
)
async def test_a_bomb_is_refused_before_it_takes_memory(
    http: httpx.AsyncClient, coding: str, data: bytes
) -> None:
    tracemalloc.start()
    try:
        for path in ("/v1/completions", "/v1/embeddings", "/v1/files"):
            headers = {"content-encoding": coding}
            if path == "/v1/files":
                headers["content-type"] = "multipart/form-data; boundary=a"
            async with asyncio.timeout(10.0):
                answer = await http.post(path, content=data, headers=headers)
            assert answer.status_code == (400 if path == "/v1/files" else 413), answer.text
        assert tracemalloc.get_traced_memory()[1] < 4 * _LIMIT_BYTES
    finally:
        tracemalloc.stop()


async def test_streams_without_content_are_not_read_for_ever(http: httpx.AsyncClient) -> None:
    empty = gzip.compress(b"") * 100_000
    for coding, data in (("gzip", empty), ("gzip, zstd", zstd.compress(empty))):
        headers = {"content-encoding": coding}
        async with asyncio.timeout(2.0):
            answer = await http.post("/v1/completions", content=data, headers=headers)
        assert code_of(answer) == (400, "invalid_content_encoding")
        assert "more than 1024 gzip streams" in answer.json()["error"]["message"]


async def test_what_compresses_well_is_read_up_to_the_limit(http: httpx.AsyncClient) -> None:
    headers = {"content-encoding": "gzip"}
    spaces = gzip.compress(_BODY + b" " * 1_000_000)
    assert len(spaces) * 200 < 1_000_000
    assert (await http.post("/v1/completions", content=spaces, headers=headers)).status_code == 200
    numbers = "".join(f" {number}" for number in range(1_500_000)).encode()
    large = zstd.compress(numbers)
    headers = {"content-encoding": "zstd"}
    answer = await http.post("/v1/completions", content=large, headers=headers)
    assert code_of(answer) == (413, "payload_too_large")


async def test_a_body_that_no_endpoint_reads_may_have_any_coding(http: httpx.AsyncClient) -> None:
    headers = {"content-encoding": "br"}
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    assert (await http.post("/absent", content=_BODY, headers=headers)).status_code == 404
