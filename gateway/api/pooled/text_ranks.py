"""``/rerank`` in the form of Text Embeddings Inference: ``texts`` in, a list of scores out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from millrace.gateway.api.pooled.pooled import AnswerHead, PooledAnswer, PooledAsk, PooledPlan
from millrace.gateway.models import ServedModelLike
from millrace.registry.requests.decoding import decode
from millrace.schemas.embeddings import RankTextsRequest, RerankList, RerankRequest, TextRank
from millrace.schemas.errors import ParameterError

_DECODER = msgspec.json.Decoder(RankTextsRequest)


class _Texts(msgspec.Struct):
    """The field by which a body in this form is known."""

    texts: msgspec.Raw = msgspec.Raw(b"")


class _Ranks(PooledAnswer[Any]):
    """The answer of a rerank in this form."""

    def __init__(self, asked: RankTextsRequest, ranked: PooledAnswer[Any]) -> None:
        self._asked = asked
        self._ranked = ranked

    def of_input(self, pooled: bytes) -> Any:
        return self._ranked.of_input(pooled)

    def whole(self, made: Sequence[Any], head: AnswerHead) -> tuple[TextRank, ...]:
        ranked = self._ranked.whole(made, head)
        assert isinstance(ranked, RerankList)
        texts = self._asked.texts if self._asked.return_text else ()
        return tuple(
            TextRank(
                index=one.index,
                score=one.relevance_score,
                text=texts[one.index] if texts else msgspec.UNSET,
            )
            for one in ranked.results
        )


def has_texts(body: bytes) -> bool:
    """Whether a body is in this form."""
    try:
        return bool(msgspec.json.decode(body, type=_Texts).texts)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


def rank_texts(body: bytes, rerank: Callable[[RerankRequest], PooledAsk]) -> PooledAsk:
    """Read a body in this form; ``rerank`` makes an ask of a rerank. Raises MillraceError."""
    asked = decode(_DECODER, body)
    if asked.truncate and asked.truncation_direction in ("Left", "left"):
        raise ParameterError(
            "truncation_direction",
            "truncation_direction: texts are cut at their end here; give Right.",
        )
    request = RerankRequest(
        model=asked.model or "",
        query=asked.query,
        documents=asked.texts,
        truncate=asked.truncate,
        return_documents=False,
        use_activation=False if asked.raw_scores else None,
    )

    def plan(model: ServedModelLike) -> PooledPlan:
        # The cosine of two embeddings has no activation.
        by_model = request if model.classifier else replace(request, use_activation=None)
        planned = rerank(by_model).plan(model)
        return planned._replace(answer=_Ranks(asked, planned.answer))

    return replace(rerank(request), model=asked.model, plan=plan)
