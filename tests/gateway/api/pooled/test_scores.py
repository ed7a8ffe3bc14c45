"""``/v1/rerank``, ``/v1/score`` and ``/pooling``: what is made of embeddings."""

from __future__ import annotations

import math
import struct
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.rendering.similarity import Vector, cosine
from millrace.schemas.frames import Failed
from millrace.schemas.pooling import Pooling
from tests.support.echo_worker import EMBEDDING_SIZE
from tests.support.running_gateway import MODEL, RunningGateway

_FLOATS = st.floats(-1e3, 1e3, width=32)
_PAIRS = st.integers(1, 32).flatmap(
    lambda size: st.tuples(*[st.lists(_FLOATS, min_size=size, max_size=size)] * 2)
)


def pooled(text: str) -> list[float]:
    """What the worker says of a text."""
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


async def test_a_model_that_fails(http: httpx.AsyncClient, front: RunningGateway) -> None:
    front.worker.end_with = Failed(code="engine_failed", message="It broke.", retryable=True)
    asked = {"model": MODEL, "query": "mill", "documents": ["a", "b"]}
    failed = await http.post("/v1/rerank", json=asked)
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
