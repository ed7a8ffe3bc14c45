"""Endpoint ``POST /v1/responses``, and the stored responses."""

from __future__ import annotations

import re
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from millrace.gateway.api.answers import SSE_HEADERS, HttpClient, follow
from millrace.gateway.api.kept.background import BackgroundResponses, NotInBackgroundError
from millrace.gateway.api.rest import RestApi, check_items_query, check_query, items_page
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import Endpoint, Prepared, read_long
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.rendering.tokens import logprob_infos
from millrace.gateway.request.admission import tier_of
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.responses.conversations import ConversationStore
from millrace.gateway.responses.input import (
    GivenItems,
    check_fields,
    generation_request_of,
    given_items,
)
from millrace.gateway.responses.references import resolve
from millrace.gateway.responses.renderer import ResponseRenderer, bytes_of
from millrace.gateway.responses.replay import replayed
from millrace.gateway.responses.store import (
    PreviousResponseNotFoundError,
    ResponseNotFoundError,
    ResponseStore,
    conversation_of,
    is_background,
    is_over,
    model_of,
)
from millrace.gateway.sessions.context_window import fit_window, num_input_tokens
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import (
    Headers,
    Receive,
    Scope,
    Send,
    json_response,
)
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.runtime.json.lines import on_one_line
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.chat.asked import Api
from millrace.schemas.errors import ModelNotFoundError, ParameterError, PayloadTooLargeError
from millrace.schemas.notices import NOTICE_HEADER, NOTICE_NAME, Notices, field_of, header_value
from millrace.schemas.responses.items import (
    InputTokens,
    Item,
    ResponseDeleted,
    ResponsesRequest,
    StoredResponse,
)
from millrace.schemas.tools import ToolDefinition

_SSE = {name.decode(): value.decode() for name, value in SSE_HEADERS}
_LOOK_S = 0.5
_NUMBER = re.compile(r"[0-9]{1,15}")


class ResponsesEndpoint(Endpoint):
    """Endpoint for OpenAI's Responses API.

    Responses are stored unless ``store`` is false, so that a later request can continue them. While
    Redis is unreachable, a request with ``store: true`` is refused; a request without ``store`` is
    answered and not stored.
    """

    route = "/v1/responses"
    id_prefix = "resp"
    api = Api.RESPONSES

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = ResponseStore(gateway.redis, gateway.config)
        self._conversations = ConversationStore(gateway.redis, gateway.config)
        self._background = BackgroundResponses(gateway, self._store)
        self._decoder = msgspec.json.Decoder(ResponsesRequest)

    async def prepare(self, body: bytes, caller: Caller, prompts: PromptPool) -> Prepared:
        """Read a body. Raises MillraceError for a body that cannot be honoured."""
        request, said = await read_long(prompts, caller, body, self._read)
        previous = await self._previous(request.previous_response_id, caller)
        earlier = () if previous is None else conversation_of(previous)
        if request.conversation_id:
            kept = await self._conversations.get(caller.tenant, request.conversation_id)
            earlier = kept.items
        given = await resolve(said, earlier, caller.tenant, self._store)
        items = (*earlier, *given)
        generation_request = await read_long(
            prompts,
            caller,
            body,
            lambda _body: generation_request_of(request, items, said.notices, said.paths),
        )
        tools = self._all_tools(generation_request)
        former = "" if previous is None else model_of(previous)
        generation_request = await self._gateway.choice.resolve(
            generation_request, caller.tenant, tier_of(generation_request, caller), former
        )
        if request.truncation == "auto":
            model = await self._gateway.models.get(
                generation_request.model, adapter=generation_request.adapter
            )
            generation_request = await fit_window(
                generation_request, tools, model, caller, self._gateway.config, prompts
            )
        if request.conversation_id:
            self._conversations.check_room(items)
        keeps = await self._keeps(request, items)
        render = partial(self._renderer, request, earlier, given, keeps)
        return Prepared(
            request=generation_request,
            stream=bool(request.stream),
            render=render,
            begin=partial(self._background.begin, render) if request.background else None,
        )

    async def count(self, body: bytes, caller: Caller, prompts: PromptPool) -> InputTokens:
        """Count the tokens of a body's prompt. Raises the same errors as ``prepare``."""
        prepared = await self.prepare(body, caller, prompts)
        tools = self._all_tools(prepared.request)
        model = await self._gateway.models.get(
            prepared.request.model, adapter=prepared.request.adapter
        )
        count = await num_input_tokens(prepared.request, tools, model, caller, prompts)
        return InputTokens(input_tokens=count, notices=field_of(prepared.request.notices))

    def _read(self, body: bytes) -> tuple[ResponsesRequest, GivenItems]:
        request = decode(self._decoder, body)
        check_fields(request)
        return request, given_items(request.input)

    def _all_tools(self, generation_request: GenerationRequest) -> tuple[ToolDefinition, ...]:
        """Return the client's tools and the gateway's tools of the request."""
        try:
            return (
                *generation_request.tools,
                *self._gateway.tools.catalogue.definitions(generation_request.server_tools),
            )
        except ParameterError as error:
            raise ParameterError("tools", error.message) from error

    async def _previous(self, previous_id: str | None, caller: Caller) -> StoredResponse | None:
        if previous_id is None:
            return None
        stored = await self._store.get(caller.tenant, previous_id)
        if stored is None or not is_over(stored):
            raise PreviousResponseNotFoundError(previous_id)
        return stored

    async def _keeps(self, request: ResponsesRequest, items: tuple[Item, ...]) -> bool:
        """Return whether the answer will be stored. Raises if storing is required and not
        possible.
        """
        if request.store is False:
            return False
        try:
            await self._store.check(items)
        except (RedisUnreachableError, PayloadTooLargeError):
            if request.store or request.background:
                raise
            return False
        return True

    def _renderer(
        self,
        request: ResponsesRequest,
        earlier: tuple[Item, ...],
        given: tuple[Item, ...],
        keeps: bool,
        response: ResponseReader,
    ) -> ResponseRenderer:
        store = self._store if keeps else None
        describe = partial(logprob_infos, response.model.tokenizer)
        return ResponseRenderer(
            request,
            response,
            earlier,
            given,
            store,
            describe,
            conversations=self._conversations,
        )


class ResponsesApi(RestApi):
    """Endpoints of stored responses; each tenant sees its own. A response is stored when it has
    ended.
    """

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._store = ResponseStore(gateway.redis, gateway.config)
        self._background = BackgroundResponses(gateway, self._store)
        self._endpoint = ResponsesEndpoint(gateway)

    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("/v1/responses/input_tokens", self.input_tokens, methods=["POST"]),
            Route(one, self.response, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self.cancel, methods=["POST"]),
            Route(f"{one}/input_items", self.input_items, methods=["GET"]),
        ]

    async def response(self, request: Request) -> HttpResponse:
        """Return the stored response, or the state of a background response so far. With
        ``stream``, return its events, from ``starting_after`` on.
        """
        check_query(request, ("stream", "starting_after"))
        is_stream, after = _is_stream(request), _starting_after(request)
        caller = await self._caller(request)
        response_id = request.path_params["response_id"]
        stored = await self._background.look(caller, response_id)
        if stored is None:
            raise ResponseNotFoundError(response_id)
        if not is_stream:
            return _whole(stored)
        if not is_background(stored):
            raise NotInBackgroundError("stream")
        if is_over(stored):
            return _replay(stored, after)
        return _Followed(self._gateway, self._background, caller, stored, response_id, after)

    async def cancel(self, request: Request) -> HttpResponse:
        """Cancel a background response."""
        caller = await self._caller(request)
        stored = await self._background.cancel(caller, request.path_params["response_id"])
        return _whole(stored)

    async def input_tokens(self, request: Request) -> HttpResponse:
        """Count the tokens that the prompt of a request would have. The call counts as a
        request.
        """
        async with self._counted_body(request) as (caller, body):
            prompts = self._gateway.prompts
            count = await self._endpoint.count(body, caller, prompts)
        return json_response(count)

    async def delete(self, request: Request) -> HttpResponse:
        """Delete a response; cancel it first if it runs in the background."""
        caller = await self._caller(request)
        response_id = request.path_params["response_id"]
        stored = await self._store.get(caller.tenant, response_id)
        if stored is not None and is_background(stored) and not is_over(stored):
            await self._background.cancel(caller, response_id)
        if not await self._store.delete(caller.tenant, response_id):
            raise ResponseNotFoundError(response_id)
        return json_response(ResponseDeleted(id=response_id))

    async def input_items(self, request: Request) -> HttpResponse:
        """List all input items before the answer in pages, newest first by default."""
        check_items_query(request)
        caller, response_id = await self._caller(request), request.path_params["response_id"]
        stored = await self._store.get(caller.tenant, response_id)
        if stored is None:
            raise ResponseNotFoundError(response_id)
        return items_page(request, stored.input)


class _ToldNotices(msgspec.Struct, frozen=True):
    """Notices of a stored response."""

    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())


_TOLD_NOTICES = msgspec.json.Decoder(_ToldNotices)


def _whole(stored: StoredResponse) -> HttpResponse:
    """Answer with a stored response, and with its notices in the header."""
    encoded = bytes(stored.response)
    return json_response(_TOLD_NOTICES.decode(encoded), encoded=encoded)


def _replay(stored: StoredResponse, after: int) -> HttpResponse:
    """Answer with the events of an ended response, after a sequence number."""
    events = on_one_line(bytes_of(replayed(bytes(stored.response), after)))
    told = {name.decode(): value.decode() for name, value in _notice_headers(stored)}
    return HttpResponse(events, headers=_SSE | told)


def _notice_headers(stored: StoredResponse) -> Headers:
    notices = _TOLD_NOTICES.decode(stored.response).notices
    return [(NOTICE_HEADER, header_value(notices))] if notices else []


class _Followed(HttpResponse):
    """Events of a background response, streamed as they come. If this gateway no longer has the
    model, another gateway may continue the response; all events are then sent after its end.
    """

    def __init__(
        self,
        gateway: Gateway,
        background: BackgroundResponses,
        caller: Caller,
        stored: StoredResponse,
        response_id: str,
        after: int,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._background = background
        self._caller = caller
        self._stored = stored
        self._response_id = response_id
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, caller, response_id = self._gateway, self._caller, self._response_id
        try:
            headers = _notice_headers(self._stored)
            await follow(gateway, scope, receive, send, caller, response_id, self._render, headers)
        except ModelNotFoundError:
            ended = await self._ended(receive)
            if ended is not None:
                await _replay(ended, self._after)(scope, receive, send)

    def _render(self, response: ResponseReader) -> Renderer:
        return self._background.renderer(self._stored, response, self._after)

    async def _ended(self, receive: Receive) -> StoredResponse | None:
        """Wait for the end of the response and return it; None if the client leaves before.

        Raises ResponseNotFoundError after ``request_timeout_s``.
        """
        gateway = self._gateway
        client = HttpClient(gateway.config.client_buffer_bytes, lambda: None)
        give_up_s = gateway.clock.monotonic() + gateway.config.request_timeout_s
        async with client.watching(receive):
            while gateway.clock.monotonic() < give_up_s:
                stored = await self._background.look(self._caller, self._response_id)
                if stored is None or is_over(stored):
                    break
                await client.wait_up_to(_LOOK_S)
                if client.has_left():
                    return None
            if stored is None or not is_over(stored):
                raise ResponseNotFoundError(self._response_id)
            return stored


def _is_stream(request: Request) -> bool:
    value = request.query_params.get("stream", "false")
    if value not in ("true", "false"):
        raise ParameterError("stream", "stream must be true or false.")
    return value == "true"


def _starting_after(request: Request) -> int:
    """Return the sequence number of ``starting_after``; -1, the default, starts at the first
    event.
    """
    value = request.query_params.get("starting_after")
    if value is None:
        return -1
    if not _is_stream(request):
        raise ParameterError("starting_after", "starting_after goes only with stream=true.")
    if not _NUMBER.fullmatch(value):
        raise ParameterError(
            "starting_after", "starting_after must be the sequence_number of an event."
        )
    return int(value)
