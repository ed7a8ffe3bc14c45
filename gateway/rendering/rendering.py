"""How an endpoint that answers with generations takes its body and shapes its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from millrace.gateway.errors import Refusal
from millrace.gateway.request.admission import LONG_BODY_BYTES
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.request.response_stream import ResponseStream
from millrace.gateway.streams.parts import Part, PartEvents
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.chat.asked import Api

_ReadT = TypeVar("_ReadT")


class Renderer(Protocol):
    """The bytes of one answer. A streamed one is ``first``, ``part`` for each of its parts and then
    ``last`` or ``failed``; another one gets its parts by ``add`` and is ``whole`` at the end.

    ``plain``, if there is one, goes before and after the JSON of a text to make the event of a part
    of the only choice that has nothing but text.
    """

    plain: tuple[bytes, bytes] | None

    def first(self) -> bytes:
        """Events before any part; may be empty."""

    def part(self, part: Part) -> PartEvents:
        """Return the events of a part, also of a part that an earlier connection sent."""

    def last(self) -> bytes:
        """Events after the last part of an answer that ended well."""

    def failed(self, refusal: Refusal) -> bytes:
        """Events after the last part of an answer that failed on the way."""

    def add(self, part: Part) -> None: ...

    def whole(self) -> bytes:
        """The body of an answer that ended well."""

    @property
    def must_store(self) -> bool:
        """Whether ``store`` has something to keep."""

    async def store(self) -> None:
        """Keep what a later request may refer to; called once at a good end, before ``last`` and
        ``whole`` are sent."""


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
    and ``renderer`` shapes the response."""

    def __init__(
        self,
        route: str,
        id_prefix: str,
        api: Api,
        request_type: type[_RequestT],
        parse: Callable[[_RequestT], GenerationRequest],
        renderer: Callable[[ResponseReader, _RequestT], Renderer],
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

        def render(response: ResponseReader) -> Renderer:
            return self._renderer(response, request)

        return Prepared(request=self._parse(request), stream=bool(request.stream), render=render)
