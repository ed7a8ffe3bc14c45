"""Endpoints that answer with generations: parsing of bodies and shaping of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from millrace.gateway.errors import Refusal
from millrace.gateway.rendering.chat import ChatRenderer
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.rendering.text_completions import CompletionRenderer
from millrace.gateway.request.admission import LONG_BODY_BYTES
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.parsing import parse_chat, parse_completion
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.chat.asked import Api
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest

_ReadT = TypeVar("_ReadT")


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed body. ``render`` is called once the answer is accepted. ``begin`` is set for a
    background answer: it is called first, and returns the initial body.
    """

    request: GenerationRequest
    stream: bool
    render: Callable[[ResponseReader], Renderer]
    begin: Callable[[ResponseStream], Awaitable[bytes]] | None = None


class Endpoint(ABC):
    """Path of the token endpoints: ``POST route``. ``id_header`` is the header in which its clients
    expect the request id, if not ``x-request-id``.
    """

    route: str
    id_prefix: str
    api: Api
    id_header: bytes = b""

    @abstractmethod
    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        """Parse a body; a long body is parsed by ``prompts``. Raises MillraceError for a body that
        cannot be honoured.
        """

    def shaped(self, refusal: Refusal) -> Refusal:
        """Return a refusal in the shape of this endpoint's clients, and of the paths below its
        own.
        """
        return refusal


async def read_long(
    prompts: PromptPool, caller: Caller, body: bytes, read: Callable[[bytes], _ReadT]
) -> _ReadT:
    """Return ``read(body)``, computed by ``prompts`` if the body is long."""
    num_bytes = len(body) if len(body) > LONG_BODY_BYTES else 0
    return await prompts.run(caller.tenant, num_bytes, partial(read, body))


class _Request(Protocol):
    @property
    def stream(self) -> bool | None: ...


_RequestT = TypeVar("_RequestT", bound=_Request)


class BodyEndpoint(Endpoint, Generic[_RequestT]):
    """Endpoint with responses that depend on the body only. ``parse`` makes a request of the body;
    ``renderer`` renders its response.
    """

    def __init__(
        self,
        route: str,
        id_prefix: str,
        api: Api,
        request_type: type[_RequestT],
        parse: Callable[[_RequestT], GenerationRequest],
        renderer: Callable[..., Renderer],
    ) -> None:
        self.route = route
        self.id_prefix = id_prefix
        self.api = api
        self._decoder = msgspec.json.Decoder(request_type)
        self._parse = parse
        self._renderer = renderer

    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        return await read_long(prompts, caller, body, self._read)

    def _read(self, body: bytes) -> Prepared:
        request = decode(self._decoder, body)
        render = partial(self._renderer, request=request)
        return Prepared(request=self._parse(request), stream=bool(request.stream), render=render)


CHAT_COMPLETIONS = BodyEndpoint(
    "/v1/chat/completions", "chatcmpl", Api.CHAT, ChatCompletionRequest, parse_chat, ChatRenderer
)
COMPLETIONS = BodyEndpoint(
    "/v1/completions",
    "cmpl",
    Api.COMPLETIONS,
    CompletionRequest,
    parse_completion,
    CompletionRenderer,
)
