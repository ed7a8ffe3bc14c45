"""Rerank, score, ``/classify`` and ``/pooling`` of models with a classification head."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.gateway.models import LoadedModels
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead, activated
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.pooling import Pooling
from tests.gateway.test_openapi import validator
from tests.support.running_gateway import (
    CONTEXT_WINDOW_TOKENS,
    MODEL,
    ByteModel,
    RunningGateway,
    running_gateway,
)

CROSS_ENCODER = ClassifierHead(
    labels=("relevant",),
    class_activation=Activation.SIGMOID,
    score_activation=Activation.SIGMOID,
)
LABELLER = ClassifierHead(
    labels=("bad", "good", "odd"),
    class_activation=Activation.SOFTMAX,
    score_activation=Activation.SOFTMAX,
)


@asynccontextmanager
async def serving(head: ClassifierHead) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    model = ByteModel()
    model.classifier = head
    model.task = "score" if head.scores_pairs else "classify"
    models = LoadedModels(
        {MODEL: ModelCard(id=MODEL, created=0, max_model_len=None)}, lambda _: model
    )
    async with running_gateway(models=models) as front:
        front.worker.num_labels = len(head.labels)
        async with httpx.AsyncClient(base_url=front.url, timeout=10) as http:
            yield front, http


@pytest.fixture
async def cross() -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    async with serving(CROSS_ENCODER) as served:
        yield served


@pytest.fixture
async def labels() -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    async with serving(LABELLER) as served:
        yield served


def logits(text: str, num_labels: int = 1) -> list[float]:
    """Return the fake worker's logits of a text."""
    return [(byte - 108) / 4 for byte in text.encode()[-num_labels:]]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def softmax(values: Sequence[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_what_the_head_says_of_each_pair(
    cross: tuple[RunningGateway, httpx.AsyncClient], path: str
) -> None:
    front, http = cross
    asked = {
        "model": MODEL,
        "query": "mill",
        "documents": ["a", {"text": "z"}, "m"],
        "user": "ada",
        "top_n": 2,
    }
    answer = (await http.post(path, json=asked)).json()
    assert [(one["index"], one["document"]["text"]) for one in answer["results"]] == [
        (1, "z"),
        (2, "m"),
    ]
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == [pytest.approx(sigmoid(*logits(text))) for text in "zm"]
    assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    prompts = {bytes(job.prompt_token_ids or ()) for job in front.worker.jobs}
    assert prompts == {b"milla", b"millz", b"millm"}
    assert {(job.pooling, job.user) for job in front.worker.jobs} == {(Pooling.CLASSIFY, "ada")}


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("mill", "x", ["millx"]),
        ("mill", ["x", "y"], ["millx", "milly"]),
        (["mill", "race"], ["x", "y"], ["millx", "racey"]),
    ],
)
async def test_pairs_are_scored(
    cross: tuple[RunningGateway, httpx.AsyncClient], first: Any, second: Any, pairs: list[str]
) -> None:
    front, http = cross
    for names in (("text_1", "text_2"), ("queries", "documents")):
        front.worker.jobs.clear()
        asked = {"model": MODEL, names[0]: first, names[1]: second}
        answer = (await http.post("/v1/score", json=asked)).json()
        scores = [one["score"] for one in answer["data"]]
        assert scores == [pytest.approx(sigmoid(*logits(pair))) for pair in pairs]
        prompts = [bytes(job.prompt_token_ids or ()).decode() for job in front.worker.jobs]
        assert sorted(prompts) == sorted(pairs)
    raw = await http.post("/score", json=asked | {"use_activation": False})
    assert [one["score"] for one in raw.json()["data"]] == [logits(pair)[0] for pair in pairs]


@pytest.mark.parametrize("joins_pairs", [False, True])
async def test_a_document_that_does_not_fit_beside_its_query(joins_pairs: bool) -> None:
    head = msgspec.structs.replace(CROSS_ENCODER, joins_pairs=joins_pairs)
    long = "y" + "z" * CONTEXT_WINDOW_TOKENS
    asked: dict[str, Any] = {"model": MODEL, "query": "mill", "documents": [long, "a"]}
    async with serving(head) as (front, http):
        refused = await http.post("/v1/rerank", json=asked)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = await http.post("/v2/rerank", json=asked | {"max_tokens_per_doc": 4_096})
        assert answer.headers["x-millrace-notice"] == 'text_cut;param="documents[0]"'
        prompts = {bytes(job.prompt_token_ids or ()).decode() for job in front.worker.jobs}
    # The test's model keeps the end of a pair where a real one cuts its longer text.
    fitting = f"mill{long}" if joins_pairs else long
    assert prompts == {fitting[:CONTEXT_WINDOW_TOKENS], "milla"}


@pytest.mark.parametrize("fields", [{"truncate": True}, {"max_tokens_per_doc": 4_096}])
async def test_a_query_that_leaves_no_room_for_a_document(fields: dict[str, Any]) -> None:
    """The refusal tells the length of the prompt, not of a document that has a text."""
    head = msgspec.structs.replace(CROSS_ENCODER, joins_pairs=True)
    query = "y" * CONTEXT_WINDOW_TOKENS
    asked = {"model": MODEL, "query": query, "documents": ["a", "b"]} | fields
    async with serving(head) as (front, http):
        refused = await http.post("/v1/rerank", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert not front.worker.jobs


async def test_a_head_may_have_no_activation() -> None:
    head = ClassifierHead(
        labels=("x",), class_activation=Activation.SIGMOID, score_activation=Activation.NONE
    )
    async with serving(head) as (_, http):
        asked = {"model": MODEL, "text_1": "mill", "text_2": "z"}
        answer = (await http.post("/v1/score", json=asked)).json()
        assert [one["score"] for one in answer["data"]] == logits("z")
        result = (await http.post("/classify", json={"model": MODEL, "input": "z"})).json()
        assert result["data"][0]["probs"] == [pytest.approx(sigmoid(*logits("z")))]


@pytest.mark.parametrize("given", ["ab", ["abz", "zza"], [97, 98], [[97], [98, 99, 122]]])
async def test_texts_are_classified(
    labels: tuple[RunningGateway, httpx.AsyncClient], given: Any
) -> None:
    _, http = labels
    texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    expected = []
    for text in texts:
        numbers = logits(text if isinstance(text, str) else bytes(text).decode(), 3)
        expected.append(numbers + [0.0] * (3 - len(numbers)))
    answer = (await http.post("/classify", json={"model": MODEL, "input": given})).json()
    validator("ClassifyList").validate(answer)
    assert answer["id"].startswith("classify-")
    for one, numbers in zip(answer["data"], expected, strict=True):
        assert one["probs"] == pytest.approx(softmax(numbers))
        assert one["label"] == LABELLER.labels[numbers.index(max(numbers))]
        assert one["num_classes"] == 3
    assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
    raw = (
        await http.post("/classify", json={"model": MODEL, "input": given, "use_activation": False})
    ).json()
    assert [one["probs"] for one in raw["data"]] == expected


async def test_pooling_tells_the_labels(
    labels: tuple[RunningGateway, httpx.AsyncClient],
) -> None:
    _, http = labels
    asked = {"model": MODEL, "input": ["abc"]}
    for more in ({}, {"task": "classify"}):
        values = (await http.post("/pooling", json=asked | more)).json()["data"][0]["data"]
        assert values == pytest.approx(softmax(logits("abc", 3)))
    raw = (await http.post("/pooling", json=asked | {"use_activation": False})).json()
    assert raw["data"][0]["data"] == logits("abc", 3)
    packed = (await http.post("/pooling", json=asked | {"encoding_format": "base64"})).json()
    numbers = struct.unpack("<3f", base64.b64decode(packed["data"][0]["data"]))
    assert list(numbers) == pytest.approx(softmax(logits("abc", 3)), rel=1e-6)


async def test_what_a_model_is_for_is_told(
    cross: tuple[RunningGateway, httpx.AsyncClient],
) -> None:
    _, http = cross
    (before,) = (await http.get("/v1/models")).json()["data"]
    assert before["task"] is None, "its files were not read so far"
    await http.post("/v1/score", json={"model": MODEL, "text_1": "a", "text_2": "b"})
    assert (await http.get(f"/v1/models/{MODEL}")).json()["task"] == "score"


_RERANK = {"query": "a", "documents": ["b"]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "embed"}, "model"),
        ("/pooling", {"input": "a", "normalize": True}, "normalize"),
        ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
        ("/pooling", {"input": "a", "pooling": "last"}, "pooling"),
        ("/v1/rerank", _RERANK | {"pooling": "mean"}, "pooling"),
        ("/v1/rerank", _RERANK | {"pooling": "classify"}, "pooling"),
        ("/v1/rerank", _RERANK | {"documents": ["b", ""]}, "documents[1]"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation"),
        ("/classify", {"input": ""}, "input"),
        ("/classify", {"input": "a", "messages": []}, "messages"),
    ],
)
async def test_what_a_cross_encoder_is_not_asked(
    cross: tuple[RunningGateway, httpx.AsyncClient], path: str, fields: dict[str, Any], param: str
) -> None:
    front, http = cross
    refused = await http.post(path, json={"model": MODEL} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert not front.worker.jobs


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", _RERANK),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_several_labels_are_no_score(
    labels: tuple[RunningGateway, httpx.AsyncClient], path: str, fields: dict[str, Any]
) -> None:
    _, http = labels
    refused = await http.post(path, json={"model": MODEL} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "/classify" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/classify", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/pooling", {"input": "a", "use_activation": True}, "use_activation"),
        ("/v1/rerank", _RERANK | {"use_activation": False}, "use_activation"),
    ],
)
async def test_what_only_a_head_can_tell(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = await http.post(path, json={"model": MODEL} | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8))
def test_activations_are_finite_and_what_they_are_called(numbers: list[float]) -> None:
    assert activated(numbers, Activation.NONE) == numbers
    each = activated(numbers, Activation.SIGMOID)
    assert all(0 <= value <= 1 for value in each)
    shares = activated(numbers, Activation.SOFTMAX)
    assert math.fsum(shares) == pytest.approx(1)
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    assert [shares[i] for i in order] == sorted(shares)
    assert [each[i] for i in order] == sorted(each)
