"""``/rerank`` in the form of Text Embeddings Inference."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from millrace.gateway.models import LoadedModels
from millrace.schemas.errors import CheckpointError
from millrace.schemas.models.cards import ModelCard
from tests.gateway.api.pooled.test_classifiers import CROSS_ENCODER, serving
from tests.gateway.api.pooled.test_scores import similarity
from tests.support.running_gateway import CONTEXT_WINDOW_TOKENS, MODEL, ByteModel, running_gateway

_ASKED: dict[str, Any] = {"query": "mill", "texts": ["zz", "mill", "mile"]}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_texts_are_ranked_by_the_only_model(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json=_ASKED)
    assert answer.status_code == 200, answer.text
    ranks = answer.json()
    assert ranks == [
        {"index": 1, "score": similarity("mill", "mill")},
        {"index": 2, "score": similarity("mill", "mile")},
        {"index": 0, "score": similarity("mill", "zz")},
    ]
    options = {"return_text": True, "raw_scores": True, "truncate": True}
    with_texts = (await http.post(path, json=_ASKED | options)).json()
    assert [one.pop("text") for one in with_texts] == ["mill", "mile", "zz"]
    assert with_texts == ranks


async def test_scores_before_the_activation() -> None:
    async with serving(CROSS_ENCODER) as (_, http):
        scores = [
            [one["score"] for one in (await http.post("/rerank", json=_ASKED | fields)).json()]
            for fields in ({}, {"raw_scores": False}, {"raw_scores": True})
        ]
        ours = {"model": "echo", "query": "mill", "documents": _ASKED["texts"]}
        raw = (await http.post("/rerank", json=ours | {"use_activation": False})).json()
    assert scores[0] == scores[1] != scores[2]
    assert all(0 < score < 1 for score in scores[0])
    assert scores[2] == [one["relevance_score"] for one in raw["results"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a", {"text": "b"}]}, "texts[1]"),
        ({"texts": "a"}, "texts"),
        ({"query": ""}, "query"),
        ({"texts": ["a" * (CONTEXT_WINDOW_TOKENS + 1)]}, "texts[0]"),
        ({"truncate": True, "truncation_direction": "Left"}, "truncation_direction"),
        ({"truncate": "END"}, "truncate"),
        ({"documents": ["a"]}, "documents"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/rerank", json=_ASKED | fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


async def test_of_several_models_one_has_to_be_named() -> None:
    scorer, other = ByteModel(), ByteModel()
    scorer.classifier, scorer.task = CROSS_ENCODER, "score"

    def load(name: str) -> ByteModel:
        if name == "broken":
            raise CheckpointError("It has no weights.")
        return loaded[name]

    for loaded, status in (({"a": other, MODEL: other}, 400), ({"a": other, MODEL: scorer}, 200)):
        names = ("broken", *loaded)
        cards = {name: ModelCard(id=name, created=0, max_model_len=None) for name in names}
        models = LoadedModels(cards, load)
        async with (
            running_gateway(models=models) as front,
            httpx.AsyncClient(base_url=front.url) as http,
        ):
            answer = await http.post("/rerank", json=_ASKED)
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["param"] == "model"
