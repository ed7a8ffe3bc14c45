"""Cross-encoder and classifier over HTTP, against transformers' results."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from millrace.bus import nats as nats_bus
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import Job, JobResult
from millrace.schemas.pooling import Pooling
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="starts seven engines; the engine's tests score with each kind of model"
    ),
]

_QUERY = "What is a millrace?"
_DOCUMENTS = ["The channel of a mill.", "Bread", "the time to the first token " * 3]


@pytest.fixture
async def http(small: System) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=small.http, timeout=60) as client:
        yield client


def logits(path: Path, *texts: str) -> list[float]:
    """Return the logits of transformers for a text or a pair."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        found: list[float] = model(**tokenizer(*texts, return_tensors="pt")).logits[0].tolist()
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


async def test_documents_are_ranked_as_transformers_would(
    http: httpx.AsyncClient, small_models: dict[str, Path]
) -> None:
    expected = [sigmoid(*logits(small_models["ranker"], _QUERY, one)) for one in _DOCUMENTS]
    assert max(expected) - min(expected) > 0.01, "there is something to rank"
    asked = {"model": "ranker", "query": _QUERY, "documents": _DOCUMENTS}
    answer = (await http.post("/v1/rerank", json=asked)).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(expected, abs=1e-5)

    assert list(found) == sorted(range(3), key=lambda i: -expected[i])
    scored = (
        await http.post(
            "/v1/score", json={"model": "ranker", "text_1": _QUERY, "text_2": _DOCUMENTS}
        )
    ).json()
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-5)


async def test_the_first_tokens_of_documents_are_read(
    http: httpx.AsyncClient, small_models: dict[str, Path]
) -> None:
    file = str(small_models["ranker"] / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    ids = [tokenizer.encode(one, add_special_tokens=False)[:4] for one in _DOCUMENTS]
    cut = [tokenizer.decode(one) for one in ids]
    expected = [sigmoid(*logits(small_models["ranker"], _QUERY, one)) for one in cut]
    asked = {"model": "ranker", "query": _QUERY, "documents": _DOCUMENTS, "max_tokens_per_doc": 4}
    answer = (await http.post("/v1/rerank", json=asked)).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(expected, abs=1e-5)


async def test_a_document_that_does_not_fit_is_cut_with_a_notice(http: httpx.AsyncClient) -> None:
    asked = {"model": "ranker", "query": _QUERY, "documents": ["Bread", "mill " * 5_000]}
    refused = await http.post("/v2/rerank", json=asked)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = await http.post("/v2/rerank", json=asked | {"max_tokens_per_doc": 4_096})
    assert answer.status_code == 200
    assert answer.headers["x-millrace-notice"] == 'text_cut;param="documents[1]"'


async def test_texts_are_classified_as_transformers_would(
    http: httpx.AsyncClient, small_models: dict[str, Path]
) -> None:
    answer = (await http.post("/classify", json={"model": "labeller", "input": _DOCUMENTS})).json()
    for result, text in zip(answer["data"], _DOCUMENTS, strict=True):
        expected = torch.tensor(logits(small_models["labeller"], text)).softmax(0)
        assert result["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert result["label"] == ("bad", "good", "odd")[int(expected.argmax())]


async def test_a_service_has_a_pair_scored(small: System, small_models: dict[str, Path]) -> None:
    bus = await nats_bus.connect(NatsConfig(url=small.endpoints["nats"]), "e2e")
    try:
        await bus.jobs.publish(
            Job(
                request_id="pair",
                model="ranker",
                prompt=_QUERY,
                text_pair=_DOCUMENTS[0],
                pooling=Pooling.CLASSIFY,
                store_result=True,
            )
        )
        found: list[JobResult] = []

        async def is_there() -> bool:
            result = await bus.results.fetch("local", "pair")
            found.extend([] if result is None else [result])
            return bool(found)

        await eventually(is_there, timeout_s=20.0)
    finally:
        await bus.close()
    score = struct.unpack("<f", found[0].embedding)
    assert score == pytest.approx(logits(small_models["ranker"], _QUERY, _DOCUMENTS[0]), abs=1e-5)


async def test_what_it_is_for_is_told_and_all_else_refused(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    tasks = {card["id"]: card["task"] for card in cards if card["id"] in ("ranker", "labeller")}
    assert tasks == {"ranker": "score", "labeller": "classify"}
    message = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (
        ("/v1/chat/completions", message),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello", "store": False}),
        ("/v1/embeddings", {"input": "Hello"}),
    ):
        refused = await http.post(path, json={"model": "ranker"} | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    refused = await http.post(
        "/v1/rerank", json={"model": "labeller", "query": "a", "documents": ["b"]}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
