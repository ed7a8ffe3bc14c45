"""``/v1/rerank``, ``/v1/score`` and ``/pooling``: what is made of embeddings."""

from __future__ import annotations

import math
import struct
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.similarity import Vector, cosine
from millrace.schemas.frames import Failed
from millrace.schemas.pooling import Pooling
from tests.support.echo_worker import EMBEDDING_SIZE
from tests.support.running_gateway import CONTEXT_WINDOW_TOKENS, MODEL, RunningGateway

_FLOATS = st.floats(-1e3, 1e3, width=32)
_PAIRS = st.integers(1, 32).flatmap(
    lambda size: st.tuples(*[st.lists(_FLOATS, min_size=size, max_size=size)] * 2)
)


_A: dict[str, Any] = {"query": "a", "documents": ["a"]}


def pooled(text: str) -> list[float]:
    """Return the fake worker's embedding of a text."""
    numbers = [float(len(Pooling.MEAN)), *map(float, text.encode())][:EMBEDDING_SIZE]
    return numbers + [0.0] * (EMBEDDING_SIZE - len(numbers))


def similarity(one: str, other: str) -> Any:
    a, b = pooled(one), pooled(other)
    product = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return pytest.approx(product / (math.hypot(*a) * math.hypot(*b)), abs=1e-9)


@given(_PAIRS)
def test_a_cosine_is_that_of_the_definition(pair: tuple[list[float], list[float]]) -> None:
    one, other = pair
    made = [Vector.of(struct.pack(f"<{len(one)}f", *values)) for values in pair]
    found = cosine(made[0], made[1])
    lengths = math.hypot(*one) * math.hypot(*other)
    if min(math.hypot(*one), math.hypot(*other)) < 1e-3:
        assert -1 <= found <= 1
        return
    product = math.fsum(x * y for x, y in zip(one, other, strict=True))
    # Of a short vector beside a long one much is lost in the difference of squares.
    ratio = max(math.hypot(*one), math.hypot(*other)) / min(math.hypot(*one), math.hypot(*other))
    assert found == pytest.approx(product / lengths, abs=1e-14 * ratio + 1e-12)


def test_what_has_no_direction_is_like_nothing() -> None:
    assert cosine(Vector.of(struct.pack("<2f", 0, 0)), Vector.of(struct.pack("<2f", 1, 0))) == 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked(
    http: httpx.AsyncClient, front: RunningGateway, path: str
) -> None:
    documents: list[Any] = ["zz", {"text": "mill"}, "mile"]
    asked = {"model": MODEL, "query": "mill", "documents": documents, "user": "ada"}
    answer = (await http.post(path, json=asked)).json()
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]
    texts = [one["document"]["text"] for one in answer["results"]]
    assert texts == ["mill", "mile", "zz"]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == [similarity("mill", text) for text in texts]
    assert answer["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert answer["id"].startswith("rerank-")
    assert {(job.pooling, job.user) for job in front.worker.jobs} == {(Pooling.MEAN, "ada")}


async def test_the_best_documents_without_their_texts(http: httpx.AsyncClient) -> None:
    asked = {
        "model": MODEL,
        "query": "mill",
        "documents": ["zzzz", "mill", "mill"],
        "top_n": 2,
        "return_documents": False,
    }
    answer = (await http.post("/v1/rerank", json=asked)).json()
    assert [(one["index"], list(one)) for one in answer["results"]] == [
        (1, ["index", "relevance_score"]),
        (2, ["index", "relevance_score"]),
    ]
    everything = (await http.post("/v1/rerank", json=asked | {"top_n": 0})).json()
    assert len(everything["results"]) == 3


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("mill", "mile", [("mill", "mile")]),
        ("mill", ["mile", "zzzz"], [("mill", "mile"), ("mill", "zzzz")]),
        (["mill", "zz"], ["mile", "zzzz"], [("mill", "mile"), ("zz", "zzzz")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_pairs_are_scored(
    http: httpx.AsyncClient, names: tuple[str, str], first: Any, second: Any, pairs: Any
) -> None:
    asked = {"model": MODEL, names[0]: first, names[1]: second}
    for path in ("/v1/score", "/score"):
        answer = (await http.post(path, json=asked)).json()
        assert answer["object"] == "list"
        assert [one["index"] for one in answer["data"]] == list(range(len(pairs)))
        assert [one["score"] for one in answer["data"]] == [similarity(*pair) for pair in pairs]


async def test_pooling_is_embeddings_by_another_name(http: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "input": ["mill", "wheel"], "task": "embed", "normalize": False}
    answer = (await http.post("/pooling", json=asked)).json()
    assert [(one["object"], one["data"]) for one in answer["data"]] == [
        ("pooling", pooled("mill")),
        ("pooling", pooled("wheel")),
    ]
    assert answer["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": "x"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": 3}]}, "documents[0].text"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"text": "x"}], "rank_fields": ["y"]},
            "documents[0]",
        ),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "rank_fields": []}, "rank_fields"),
        ("/v1/rerank", _A | {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/v1/rerank", _A | {"max_doc_length": -1}, "max_doc_length"),
        ("/v1/rerank", _A | {"max_query_length": 0}, "max_query_length"),
        ("/v1/rerank", _A | {"max_chunks_per_doc": 0}, "max_chunks_per_doc"),
        ("/v1/rerank", _A | {"truncate": "START"}, "truncate"),
        ("/v1/rerank", _A | {"truncate": "MIDDLE"}, "truncate"),
        ("/v1/rerank", _A | {"truncate": True, "truncate_prompt_tokens": 3}, "truncate"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        (
            "/v1/score",
            {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 0},
            "max_tokens_per_doc",
        ),
        (
            "/v1/embeddings",
            {"input": "a", "truncate": "END", "truncate_prompt_tokens": 3},
            "truncate",
        ),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2_049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "wat": 1}, "wat"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "user": "u" * 300}, "user"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "b"}, "text_1"),
        ("/v1/score", {"queries": [], "documents": "b"}, "queries"),
        ("/pooling", {"input": "a", "task": "score"}, "task"),
    ],
)
async def test_what_cannot_be_compared(
    http: httpx.AsyncClient, front: RunningGateway, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = await http.post(path, json={"model": MODEL} | fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert not front.worker.jobs


# What langchain-cohere, Cohere's v1 and v2 clients, Jina's and litellm's send.
@pytest.mark.parametrize(
    "fields",
    [
        {"top_n": 3, "max_tokens_per_doc": 4000},
        {"top_n": None, "max_tokens_per_doc": 4096, "priority": 0},
        {"return_documents": False, "max_chunks_per_doc": 10, "rank_fields": ["text"]},
        {"top_n": 3, "return_documents": True, "truncate": True, "max_doc_length": 1024},
        {"rank_fields": None, "max_chunks_per_doc": None, "max_tokens_per_doc": None},
    ],
)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_what_clients_send(http: httpx.AsyncClient, path: str, fields: Any) -> None:
    asked = {"model": MODEL, "query": "mill", "documents": ["zz", "mill"]} | fields
    answer = await http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()["results"]] == [1, 0]
    assert "x-millrace-notice" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"max_tokens_per_doc": 4}, "mill"),
        ({"max_doc_length": 4}, "mill"),
        ({"max_tokens_per_doc": 9, "max_doc_length": 4}, "mill"),
        ({"max_tokens_per_doc": 6, "documents": ["mill\u20acxx"]}, "mill"),
        ({"max_tokens_per_doc": 7, "documents": ["mill\u20acxx"]}, "mill\u20ac"),
        ({"max_tokens_per_doc": 7}, "mill st"),
        ({"max_tokens_per_doc": 100}, "mill stone"),
        ({"max_query_length": 2}, "mill stone"),
    ],
)
async def test_the_first_tokens_of_texts_are_read(
    http: httpx.AsyncClient, front: RunningGateway, fields: dict[str, Any], kept: str
) -> None:
    asked = {"model": MODEL, "query": "mile", "documents": ["mill stone"]} | fields
    answer = await http.post("/v1/rerank", json=asked)
    query, document = (bytes(job.prompt_token_ids or ()).decode() for job in front.worker.jobs)
    assert (query, document) == ("mi" if "max_query_length" in fields else "mile", kept)
    (result,) = answer.json()["results"]
    assert result["document"] == {"text": asked["documents"][0]}
    assert result["relevance_score"] == similarity(query, kept)
    assert answer.json()["usage"]["prompt_tokens"] == len((query + kept).encode())
    of_score = {name: value for name, value in fields.items() if name != "documents"}
    pair = {"model": MODEL, "text_1": "mile", "text_2": asked["documents"]}
    scored = await http.post("/v1/score", json=pair | of_score)
    assert scored.json()["data"][0]["score"] == result["relevance_score"]


@pytest.mark.parametrize(
    ("field", "where"), [("max_tokens_per_doc", "documents[1]"), ("max_query_length", "query")]
)
async def test_a_limit_below_the_first_character_is_refused(
    http: httpx.AsyncClient, field: str, where: str
) -> None:
    asked = {"model": MODEL, "query": "\u20ac", "documents": ["a", "\u20ac"], field: 2}
    error = (await http.post("/v1/rerank", json=asked)).json()["error"]
    assert error["param"] == where
    assert "more tokens than the limit of 2" in error["message"]


@pytest.mark.parametrize(
    ("fields", "status", "notice"),
    [
        ({}, 400, None),
        ({"truncate": False}, 400, None),
        ({"truncate": "NONE", "max_tokens_per_doc": 9_000}, 400, None),
        ({"truncate": True}, 200, None),
        ({"truncate": "END"}, 200, None),
        ({"max_tokens_per_doc": 9_000}, 200, 'text_cut;param="documents[1]"'),
    ],
)
async def test_a_document_that_does_not_fit(
    http: httpx.AsyncClient,
    front: RunningGateway,
    fields: dict[str, Any],
    status: int,
    notice: str | None,
) -> None:
    documents = ["a", "b" + "c" * CONTEXT_WINDOW_TOKENS]
    asked = {"model": MODEL, "query": "mill", "documents": documents} | fields
    answer = await http.post("/v1/rerank", json=asked)
    assert answer.status_code == status
    assert answer.headers.get("x-millrace-notice") == notice
    if status == 400:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "documents[1]"
        return
    told = answer.json().get("x-millrace-notice")
    assert told == ([{"code": "text_cut", "param": "documents[1]"}] if notice else None)
    prompts = {job.prompt_token_ids for job in front.worker.jobs}
    assert tuple(documents[1][:CONTEXT_WINDOW_TOKENS].encode()) in prompts


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, "mill"),
        ({"rank_fields": ["text"]}, "mill"),
        ({"rank_fields": ["title"]}, "A"),
        ({"rank_fields": ["title", "none"]}, "A"),
        ({"rank_fields": ["title", "text"]}, "title: A\ntext: mill\n"),
        ({"rank_fields": ["tags", "title"]}, "tags:\n- x\n- \u00fc\ntitle: A\n"),
    ],
)
async def test_objects_are_documents(
    http: httpx.AsyncClient, front: RunningGateway, fields: dict[str, Any], read: str
) -> None:
    document = {"text": "mill", "title": "A", "tags": ["x", "\u00fc"], "none": None}
    asked = {"model": MODEL, "query": "mill", "documents": [document, "b"]} | fields
    answer = await http.post("/v2/rerank", json=asked)
    prompts = [bytes(job.prompt_token_ids or ()).decode() for job in front.worker.jobs]
    assert sorted(prompts) == sorted(["mill", read, "b"])
    documents = {one["index"]: one["document"] for one in answer.json()["results"]}
    assert documents == {0: document, 1: {"text": "b"}}


@pytest.mark.parametrize(
    ("truncate", "kept"),
    [
        ("START", slice(-CONTEXT_WINDOW_TOKENS, None)),
        ("END", slice(CONTEXT_WINDOW_TOKENS)),
        (True, slice(CONTEXT_WINDOW_TOKENS)),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_where_an_input_for_embeddings_is_cut(
    http: httpx.AsyncClient, front: RunningGateway, path: str, truncate: Any, kept: slice
) -> None:
    text = "a" + "b" * CONTEXT_WINDOW_TOKENS
    ids = tuple(text.encode())
    asked = {"model": MODEL, "input": [text], "truncate": truncate}
    assert (await http.post(path, json=asked)).status_code == 200
    assert (await http.post(path, json=asked | {"input": [ids]})).status_code == 200
    assert [job.prompt_token_ids for job in front.worker.jobs] == [ids[kept]] * 2


async def test_a_model_that_fails(http: httpx.AsyncClient, front: RunningGateway) -> None:
    front.worker.end_with = Failed(code="engine_failed", message="It broke.", retryable=True)
    asked = {"model": MODEL, "query": "mill", "documents": ["a", "b"]}
    failed = await http.post("/v1/rerank", json=asked)
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
