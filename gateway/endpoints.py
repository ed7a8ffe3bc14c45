"""How an endpoint that answers with generations takes its body and shapes its answer."""

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
    """A body that was understood. ``render`` is called once the answer is accepted. With ``begin``
    it is made in the background: that is called before, and gives the body that says so."""

    request: GenerationRequest
    stream: bool
    render: Callable[[ResponseReader], Renderer]
    begin: Callable[[ResponseStream], Awaitable[bytes]] | None = None


class Endpoint(ABC):
    """One path of the token path: ``POST route``. ``id_header`` is what its clients call
    ``x-request-id``, if they have another name for it."""

    route: str
    id_prefix: str
    api: Api
    id_header: bytes = b""

    @abstractmethod
    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        """Raises MillraceError for a body that cannot be honoured; a long one is read by
        ``prompts``."""

    def shaped(self, refusal: Refusal) -> Refusal:
        """A refusal as clients of this endpoint, and of the paths below its own, read it."""
        return refusal


async def read_long(
    prompts: PromptPool, caller: Caller, body: bytes, read: Callable[[bytes], _ReadT]
) -> _ReadT:
    """What ``read`` makes of a body; by ``prompts`` if that takes long."""
    num_bytes = len(body) if len(body) > LONG_BODY_BYTES else 0
    return await prompts.run(caller.tenant, num_bytes, partial(read, body))


class _Request(Protocol):
    @property
    def stream(self) -> bool | None: ...


_RequestT = TypeVar("_RequestT", bound=_Request)


class BodyEndpoint(Endpoint, Generic[_RequestT]):
    """An endpoint whose responses depend on nothing but the body: ``parse`` makes a request of it,
    and ``renderer`` shapes the response: it takes the ``request`` after it."""

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
