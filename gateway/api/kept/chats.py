"""Endpoints ``/v1/chats``: conversations of a front end, shared by the tenant's browsers;
``/v1/sessions/{id}``: read and delete a session of the gateway.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.rest import RestApi, limit_of, list_response, refuse_other_fields
from millrace.gateway.core import Gateway
from millrace.gateway.sessions.chats import ChatNotFoundError, ChatStore
from millrace.gateway.sessions.sessions import SessionNotFoundError
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.http import json_response
from millrace.schemas.chat.chats import MAX_TITLE_CHARACTERS, ChatDeleted, ChatList, ChatUpdate
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS

MAX_PAGE_CHATS = 100
_PAGE_CHATS = 20


class ChatsNeedKeyError(MillraceError, code="chats_need_key", http_status=403):
    """Chats request without a key. Callers without a key cannot be told apart, so nothing is stored
    for them.
    """

    def __init__(self) -> None:
        super().__init__(
            "Chats are kept for callers with an API key. Without one, keep them in the browser."
        )


class ChatsApi(RestApi):
    """Chat endpoints of one gateway; each tenant sees its own chats."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._store = ChatStore(gateway.redis, gateway.config, gateway.clock)

    def routes(self) -> list[Route]:
        one = "/v1/chats/{chat_id}"
        return [
            Route("/v1/chats", self.list, methods=["GET"]),
            Route(one, self.chat, methods=["GET"]),
            Route(one, self.put, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """List chats in pages, the last changed first. A chat that changes between two pages may
        appear twice or be missing.
        """
        refuse_other_fields(request, ("limit", "after"))
        caller = await self._caller(request)
        num = limit_of(request, _PAGE_CHATS, MAX_PAGE_CHATS)
        after = request.query_params.get("after", "")
        found, has_more = await self._store.list_newest(caller.tenant, after, num)
        return list_response(ChatList, found, has_more)

    async def chat(self, request: Request) -> Response:
        caller = await self._caller(request)
        return json_response(await self._store.get(caller.tenant, request.path_params["chat_id"]))

    async def put(self, request: Request) -> Response:
        """Store a new chat, or a new revision of it."""
        caller = await self._caller(request)
        asked = await self._read(request, ChatUpdate)
        _check(asked)
        return json_response(
            await self._store.put(caller.tenant, request.path_params["chat_id"], asked)
        )

    async def delete(self, request: Request) -> Response:
        caller = await self._caller(request)
        chat_id = request.path_params["chat_id"]
        if not await self._store.delete(caller.tenant, chat_id):
            raise ChatNotFoundError
        return json_response(ChatDeleted(id=chat_id))

    async def _caller(self, request: Request) -> Caller:
        caller = await super()._caller(request)
        if not caller.key_id:
            raise ChatsNeedKeyError
        return caller


def _check(asked: ChatUpdate) -> None:
    """Raise ParameterError for an invalid update."""
    if not 0 <= asked.revision < 2**53:
        raise ParameterError("revision", "revision must be the last revision that you read, or 0.")
    if len(asked.title) > MAX_TITLE_CHARACTERS:
        raise ParameterError("title", f"title has at most {MAX_TITLE_CHARACTERS} characters.")
    if not bytes(asked.document).lstrip().startswith(b"{"):
        raise ParameterError("document", "document must be a JSON object.")


class SessionDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["session"]
    deleted: bool


class SessionsApi(RestApi):
    """Session endpoints of one gateway; each tenant sees its own sessions."""

    def routes(self) -> list[Route]:
        path = "/v1/sessions/{session_id:path}"
        return [
            Route(path, self.read, methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
        ]

    async def read(self, request: Request) -> Response:
        """Return the stored turns of a session. Reading does not extend the session's life."""
        caller = await self._caller(request)
        session_id = _session_id(request)
        return json_response(await self._gateway.sessions.history(caller.tenant, session_id))

    async def delete(self, request: Request) -> Response:
        """Delete a session, and turns that running requests would add to it."""
        caller = await self._caller(request)
        session_id = _session_id(request)
        await self._gateway.sessions.delete(caller.tenant, session_id)
        return json_response(SessionDeleted(id=session_id, object="session", deleted=True))


def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    if not 1 <= len(session_id) <= MAX_LABEL_CHARACTERS:
        raise SessionNotFoundError
    return session_id
