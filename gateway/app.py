"""ASGI application: token endpoints on bare ASGI, all others on Starlette."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from millrace.gateway.api import pages
from millrace.gateway.api.administration import AdaptersApi, PrefixCachesApi, RolloutsApi
from millrace.gateway.api.batches import BatchesApi
from millrace.gateway.api.files import FilesApi
from millrace.gateway.api.generations import GenerationHandler
from millrace.gateway.api.kept.chats import ChatsApi, SessionsApi
from millrace.gateway.api.kept.conversations import ConversationsApi
from millrace.gateway.api.kept.responses import ResponsesApi, ResponsesEndpoint
from millrace.gateway.api.messages import VERSION_HEADER, MessagesApi, MessagesEndpoint
from millrace.gateway.api.ops import OpsApi
from millrace.gateway.api.pooled.embeddings import embedding_endpoints
from millrace.gateway.api.pooled.scores import scoring_endpoints
from millrace.gateway.api.socket.websocket import ROUTE as WEBSOCKET_ROUTE
from millrace.gateway.api.socket.websocket import WebSocketHandler
from millrace.gateway.api.system import GatewayApi
from millrace.gateway.core import Gateway
from millrace.gateway.endpoints import CHAT_COMPLETIONS, COMPLETIONS, Endpoint
from millrace.gateway.errors import (
    MethodNotAllowedError,
    NotFoundError,
    Refusal,
    UpgradeRequiredError,
    refusal_of,
)
from millrace.gateway.openapi import document as openapi
from millrace.gateway.tenancy.identity import token_of
from millrace.gateway.transport.http import (
    CALLER,
    REFUSED,
    SHAPED,
    AsgiApp,
    ClientLeftError,
    Event,
    Receive,
    RequestIds,
    Scope,
    Send,
    header_of,
    new_request_id,
    refuse_and_close,
    refuse_handshake,
    request_id_header,
    with_id_also_as,
)
from millrace.gateway.transport.origins import OriginGuard, ProxyReader
from millrace.runtime.http.content_coding import with_decoded_body
from millrace.schemas.errors import MillraceError, shown

_log = logging.getLogger(__name__)

_UNMATCHED = "unmatched"
_ORIGIN = "origin"
_METHODS_OF_FILES = {"GET", "HEAD"}
_API = "/v1/"  # where a slash at the end changes nothing


def build_app(gateway: Gateway) -> AsgiApp:
    """Build the application that uvicorn serves."""
    endpoints = token_endpoints(gateway)
    token_path: dict[str, AsgiApp] = {
        endpoint.route: _in_words_of(endpoint, GenerationHandler(gateway, endpoint))
        for endpoint in endpoints
    }
    gateway.metrics.know_routes(token_path)
    socket = WebSocketHandler(gateway)
    rest = _counted(gateway, _starlette(gateway))
    below = {
        f"{endpoint.route}/": _in_words_of(endpoint, rest)
        for endpoint in endpoints
        if endpoint.id_header
    }
    messages = MessagesEndpoint(gateway)
    rest_of_anthropic = _in_words_of(messages, rest)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path[-1:] == "/" and path.startswith(_API):
            path = scope["path"] = path.rstrip("/")
        if scope["type"] == "http":
            receive = with_decoded_body(scope, receive)
            serve = token_path.get(path)
            if serve is None:
                is_anthropic = header_of(scope, VERSION_HEADER) is not None
                others = rest_of_anthropic if is_anthropic else rest
                serve = next((below[stem] for stem in below if path.startswith(stem)), others)
            await serve(scope, receive, send)
        elif path == WEBSOCKET_ROUTE:
            await socket(scope, receive, send)
        else:
            await receive()
            gateway.metrics.count_request(_UNMATCHED, 404)
            text = f"No WebSocket is served at {shown(path)}; there is one at {WEBSOCKET_ROUTE}."
            refusal = refusal_of(NotFoundError(text))
            gateway.refusals.note(_UNMATCHED, refusal, None)
            await refuse_handshake(scope, send, refusal)

    def refused(scope: Scope, refusal: Refusal) -> Refusal:
        if _is_noted(scope, refusal):
            gateway.refusals.note(_ORIGIN, refusal, None)
        is_messages = f"{scope['path']}/".startswith(f"{messages.route}/")
        return messages.shaped(refusal) if is_messages else refusal

    guarded = OriginGuard(app, gateway.config, refused, gateway.identity.demands_key_of)
    return RequestIds(ProxyReader(guarded, gateway.config))


def token_endpoints(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints that answer with generations."""
    return [CHAT_COMPLETIONS, COMPLETIONS, ResponsesEndpoint(gateway), MessagesEndpoint(gateway)]


def _in_words_of(endpoint: Endpoint, app: AsgiApp) -> AsgiApp:
    """Shape refusals for the endpoint's clients, and send the request id under their name for
    it.
    """
    if not endpoint.id_header:
        return app

    async def reworded(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHAPED] = endpoint.shaped
        await app(scope, receive, with_id_also_as(endpoint.id_header, send))

    return reworded


def _starlette(gateway: Gateway) -> Starlette:
    pooled = [*embedding_endpoints(gateway), *scoring_endpoints(gateway)]
    app = Starlette(
        routes=[
            *GatewayApi(gateway).routes(),
            *(route for one in pooled for route in one.routes()),
            *ResponsesApi(gateway).routes(),
            *ConversationsApi(gateway).routes(),
            *ChatsApi(gateway).routes(),
            *MessagesApi(gateway).routes(),
            *FilesApi(gateway).routes(),
            *BatchesApi(gateway).routes(),
            *SessionsApi(gateway).routes(),
            *AdaptersApi(gateway).routes(),
            *RolloutsApi(gateway).routes(),
            *PrefixCachesApi(gateway).routes(),
            *OpsApi(gateway).routes(),
            *openapi.routes(),
            *pages.routes(),
            Route(WEBSOCKET_ROUTE, _upgrade_required, methods=["GET"]),
        ],
        exception_handlers={
            MillraceError: _answer_error,
            HTTPException: _answer_http_exception,
            ClientLeftError: _answer_nobody,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        },
    )
    # A trailing slash is removed above: a redirect that adds one would never end.
    app.router.redirect_slashes = False
    return app


def _counted(gateway: Gateway, app: Starlette) -> AsgiApp:
    """Count each response by its route's template, and add a request id if it has none."""
    templates = (route.path for route in app.routes if isinstance(route, Route))
    gateway.metrics.know_routes((*templates, _UNMATCHED))

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        request_id = new_request_id("req")

        async def send_with_id(event: Event) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                own = request_id_header(request_id)
                if all(name != own[0] for name, _ in event["headers"]):
                    event["headers"] = [*event["headers"], own]
            await send(event)

        try:
            await app(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", _UNMATCHED) if status else _UNMATCHED
            gateway.metrics.count_request(route, status or 500)
            refusal: Refusal | None = scope.get(REFUSED)
            if refusal is not None and _is_noted(scope, refusal):
                gateway.refusals.note(route, refusal, scope.get(CALLER), request_id)

    return counted


def _is_noted(scope: Scope, refusal: Refusal) -> bool:
    """Return whether a refusal is recorded, which is true for refused API requests. Pages, icons,
    the queries of /ops, probes and scrapes are not recorded, nor is a page's request that tests
    whether a key is needed.
    """
    if scope.get("method") not in _METHODS_OF_FILES:
        return True
    is_keyless = refusal.status == 401 and token_of(scope) is None
    return scope["path"].startswith(_API) and not is_keyless


def _refused(request: Request, refusal: Refusal) -> Refusal:
    """Have a refusal recorded after the response is sent; return it in the shape of this path's
    clients.
    """
    request.scope[REFUSED] = refusal
    shaped: Callable[[Refusal], Refusal] | None = request.scope.get(SHAPED)
    return refusal if shaped is None else shaped(refusal)


def _response(refusal: Refusal) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    return Response(refusal.body, refusal.status, headers, "application/json")


class _LastResponse(Response):
    """Response that closes the connection if the body was not read to its end, since the rest must
    not be read as the next request.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(status_code=refusal.status)
        self._refusal = refusal

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await refuse_and_close(receive, send, self._refusal)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MillraceError)
    refusal = _refused(request, refusal_of(error))
    return _LastResponse(refusal) if refusal.status in {408, 413} else _response(refusal)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        refusal = refusal_of(NotFoundError(f"Nothing is served at {shown(path)}."))
        return _response(_refused(request, refusal))
    if error.status_code == 405:
        allowed = _methods_of(request)
        refusal = refusal_of(MethodNotAllowedError(shown(path), request.method, allowed))
        return _response(_refused(request, refusal))
    refusal = Refusal(status=error.status_code, code="http_error", message=error.detail)
    return _response(_refused(request, refusal))


def _methods_of(request: Request) -> set[str]:
    """Return the methods of a path: of all routes to it, or of a file."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return methods or _METHODS_OF_FILES


async def _upgrade_required(_request: Request) -> Response:
    raise UpgradeRequiredError(WEBSOCKET_ROUTE)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    _log.error("a request failed", exc_info=error)
    message = "The gateway failed to answer this request."
    refusal = Refusal(status=500, code="internal_error", message=message)
    return _response(_refused(request, refusal))
