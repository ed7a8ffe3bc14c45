"""``/v1/chats``: what a front end keeps of its conversations, for the tenant's other browsers."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.paging import limit_of, list_response
from millrace.gateway.core import Gateway
from millrace.gateway.sessions.chats import ChatNotFoundError, ChatStore
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import json_response, read_body
from millrace.registry.requests.decoding import decode
from millrace.schemas.chat.chats import MAX_TITLE_CHARACTERS, ChatDeleted, ChatList, ChatUpdate
from millrace.schemas.errors import MillraceError, ParameterError

MAX_PAGE_CHATS = 100
_PAGE_CHATS = 20


class ChatsNeedKeyError(MillraceError, code="chats_need_key", http_status=403):
    """Callers without a key cannot be told apart, so nothing is kept that they could list."""

    def __init__(self) -> None:
        super().__init__(
            "Chats are kept for callers with an API key. Without one, keep them in the browser."
        )


class ChatsApi:
    """Starlette endpoints over one gateway; each tenant sees its own chats."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = ChatStore(gateway.redis, gateway.config, gateway.clock)
        self._update = msgspec.json.Decoder(ChatUpdate)

    def routes(self) -> list[Route]:
        one = "/v1/chats/{chat_id}"
        return [
            Route("/v1/chats", self.list, methods=["GET"]),
            Route(one, self.chat, methods=["GET"]),
            Route(one, self.put, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """In pages, the last changed first. One that is changed while they are read may come again
        or be missing."""
        for name in request.query_params:
            if name not in ("limit", "after"):
                raise ParameterError(name, f"{name} is not a field of this request; leave it out.")
        caller = await self._caller(request)
        num = limit_of(request, _PAGE_CHATS, MAX_PAGE_CHATS)
        after = request.query_params.get("after", "")
        found, has_more = await self._store.list_newest(caller.tenant, after, num)
        return list_response(ChatList, found, has_more)

    async def chat(self, request: Request) -> Response:
        caller = await self._caller(request)
        return json_response(await self._store.get(caller.tenant, _chat_id(request)))

    async def put(self, request: Request) -> Response:
        """Keep a new one, or another revision of it."""
        caller = await self._caller(request)
        body = await read_body(request.scope, request.receive, self._gateway.config)
        asked = decode(self._update, body)
        _check(asked)
        return json_response(await self._store.put(caller.tenant, _chat_id(request), asked))

    async def delete(self, request: Request) -> Response:
        caller = await self._caller(request)
        chat_id = _chat_id(request)
        if not await self._store.delete(caller.tenant, chat_id):
            raise ChatNotFoundError
        return json_response(ChatDeleted(id=chat_id))

    async def _caller(self, request: Request) -> Caller:
        caller = await self._gateway.identity.caller(request.scope)
        if not caller.key_id:
            raise ChatsNeedKeyError
        return caller


def _check(asked: ChatUpdate) -> None:
    """Raises ParameterError."""
    if not 0 <= asked.revision < 2**53:
        raise ParameterError("revision", "revision must be that of what was read last, or 0.")
    if len(asked.title) > MAX_TITLE_CHARACTERS:
        raise ParameterError("title", f"title has at most {MAX_TITLE_CHARACTERS} characters.")
    if not bytes(asked.document).lstrip().startswith(b"{"):
        raise ParameterError("document", "document must be a JSON object.")


def _chat_id(request: Request) -> str:
    chat_id: str = request.path_params["chat_id"]
    return chat_id
