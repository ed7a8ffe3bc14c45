"""Endpoints of Anthropic's Messages API: ``POST /v1/messages``, ``/v1/messages/count_tokens``, and
models in Anthropic's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.rest import RestApi, limit_of, place_of
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint, Prepared, read_long
from millrace.gateway.errors import Refusal
from millrace.gateway.messages.input import generation_request_of
from millrace.gateway.messages.renderer import MessageRenderer, in_messages_shape
from millrace.gateway.request.admission import tier_of
from millrace.gateway.sessions.context_window import num_input_tokens
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import json_response
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.anthropic.answers import ModelInfo, ModelPage, TokenCount
from millrace.schemas.anthropic.requests import MessagesRequest
from millrace.schemas.chat.asked import Api
from millrace.schemas.errors import ParameterError
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.notices import field_of
from millrace.schemas.tenants import lower_limit

COUNT_TOKENS = "/v1/messages/count_tokens"
# A client that sends this header reads Anthropic's shapes.
VERSION_HEADER = b"anthropic-version"
_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1_000


class MessagesEndpoint(Endpoint):
    """Endpoint for Anthropic's Messages API."""

    route = "/v1/messages"
    id_prefix = "msg"
    api = Api.MESSAGES
    id_header = b"request-id"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(MessagesRequest)

    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        """Read a body. Raises MillraceError for a body that cannot be honoured."""
        request, generation_request = await self._read_by(prompts, caller, body)
        if request.max_tokens is None:
            raise ParameterError("max_tokens", "max_tokens is required.")
        return Prepared(
            request=generation_request, stream=bool(request.stream), render=MessageRenderer
        )

    async def count(self, body: bytes, caller: Caller, prompts: PromptPool) -> TokenCount:
        """Count the tokens of a body's prompt. Raises the same errors as ``prepare``."""
        _, request = await self._read_by(prompts, caller, body)
        model = await self._gateway.models.get(request.model, adapter=request.adapter)
        count = await num_input_tokens(request, request.tools, model, caller, prompts)
        return TokenCount(input_tokens=count, notices=field_of(request.notices))

    def shaped(self, refusal: Refusal) -> Refusal:
        return in_messages_shape(refusal)

    async def _read_by(
        self, prompts: PromptPool, caller: Caller, body: bytes
    ) -> tuple[MessagesRequest, GenerationRequest]:
        request, generation_request = await read_long(prompts, caller, body, self._read)
        generation_request = await self._gateway.choice.resolve(
            generation_request, caller.tenant, tier_of(generation_request, caller)
        )
        return request, generation_request

    def _read(self, body: bytes) -> tuple[MessagesRequest, GenerationRequest]:
        request = decode(self._decoder, body)
        return request, generation_request_of(request)


class MessagesApi(RestApi):
    """Endpoints of the Messages API beside generation."""

    def routes(self) -> list[Route]:
        return [Route(COUNT_TOKENS, self.count_tokens, methods=["POST"])]

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens that the prompt of a request would have. The call counts as a
        request.
        """
        async with self._counted_body(request) as (caller, body):
            endpoint = MessagesEndpoint(self._gateway)
            count = await endpoint.count(body, caller, self._gateway.prompts)
        return json_response(count)


def model_info(card: ModelCard, caller: Caller) -> ModelInfo:
    """Return the model as ``caller`` may use it."""
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
    """Return the page that the query selects: ``limit`` models (default 20, from 1 to 1,000) after
    ``after_id`` or before ``before_id``, only those in one of the stages ``lifecycle``.

    Raises ParameterError.
    """
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
    place = place_of(cards, wanted)
    if place is not None:
        return place
    raise ParameterError(field, f"{field}: there is no model {wanted!r:.100} in this list.")
