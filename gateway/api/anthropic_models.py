"""``/v1/models`` for clients of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.requests import Request

from millrace.gateway.api.paging import limit_of
from millrace.gateway.tenancy.identity import Caller
from millrace.schemas.anthropic.answers import ModelInfo, ModelPage
from millrace.schemas.errors import ParameterError
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tenants import lower_limit

# A client that sends it reads Anthropic's forms.
VERSION_HEADER = b"anthropic-version"
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1_000


def model_info(card: ModelCard, caller: Caller) -> ModelInfo:
    """The model as ``caller`` may use it."""
    window_tokens = lower_limit(card.max_model_len, caller.context_tokens)
    created = datetime.fromtimestamp(card.created, UTC)
    return ModelInfo(
        id=card.id,
        display_name=card.id,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=window_tokens,
        max_tokens=window_tokens,
    )


def model_page(request: Request, cards: Sequence[ModelCard], caller: Caller) -> ModelPage:
    """The page that the query asks for: ``limit`` models (20; 1 to 1,000), behind ``after_id`` or
    before ``before_id``, of those in one of the stages ``lifecycle``. Raises ParameterError."""
    query = request.query_params
    limit = limit_of(request, _DEFAULT_LIMIT, _MAX_LIMIT)
    stages = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    if stages and "active" not in stages:
        cards = ()
    if query.get("after_id") and query.get("before_id"):
        raise ParameterError("before_id", "Give one of after_id and before_id.")
    if query.get("before_id"):
        left = cards[: _place(request, "before_id", cards)]
        page, has_more = left[-limit:], len(left) > limit
    else:
        left = cards[_place(request, "after_id", cards) + 1 :] if query.get("after_id") else cards
        page, has_more = left[:limit], len(left) > limit
    return ModelPage(
        data=tuple(model_info(card, caller) for card in page),
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _place(request: Request, field: str, cards: Sequence[ModelCard]) -> int:
    wanted = request.query_params[field]
    for place, card in enumerate(cards):
        if card.id == wanted:
            return place
    raise ParameterError(field, f"{field}: there is no model {wanted!r:.100} in this list.")
