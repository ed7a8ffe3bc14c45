"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.counted_reading import counted_body
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint, Prepared, read_long
from millrace.gateway.errors import Refusal
from millrace.gateway.messages.input import generation_request_of
from millrace.gateway.messages.renderer import MessageRenderer, in_messages_shape
from millrace.gateway.request.admission import tier_of
from millrace.gateway.responses.window import num_input_tokens
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import json_response
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.anthropic.answers import TokenCount
from millrace.schemas.anthropic.requests import MessagesRequest
from millrace.schemas.chat.asked import Api
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import field_of

COUNT_TOKENS = "/v1/messages/count_tokens"


class MessagesEndpoint(Endpoint):
    """Answers in the shape of Anthropic's Messages API."""

    route = "/v1/messages"
    id_prefix = "msg"
    api = Api.MESSAGES
    id_header = b"request-id"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(MessagesRequest)

    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        """Raises MillraceError for a body that cannot be honoured."""
        request, generation_request = await self._read_by(prompts, caller, body)
        if request.max_tokens is None:
            raise ParameterError("max_tokens", "max_tokens is required.")
        return Prepared(
            request=generation_request, stream=bool(request.stream), render=MessageRenderer
        )

    async def count(self, body: bytes, caller: Caller, prompts: PromptPool) -> TokenCount:
        """The tokens of the prompt that a body makes. Raises what ``prepare`` raises."""
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


class MessagesApi:
    """What there is of the Messages API beside answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._endpoint = MessagesEndpoint(gateway)

    def routes(self) -> list[Route]:
        return [Route(COUNT_TOKENS, self.count_tokens, methods=["POST"])]

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a request would have. It counts as a request."""
        async with counted_body(self._gateway, request) as (caller, body):
            prompts = self._gateway.prompts
            count = await self._endpoint.count(body, caller, prompts)
        return json_response(count)
