"""``/v1/sessions/{id}``: a kept conversation, to read and to delete."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.core import Gateway
from millrace.gateway.sessions.sessions import SessionNotFoundError
from millrace.gateway.transport.http import json_response
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS


class SessionDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["session"]
    deleted: bool


class SessionsApi:
    """Starlette endpoints over one gateway's sessions; a caller sees its own tenant's only."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        path = "/v1/sessions/{session_id:path}"
        return [
            Route(path, self.read, methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
        ]

    async def read(self, request: Request) -> Response:
        """The turns that are kept. Looking at them does not prolong a session's life."""
        caller = await self._gateway.identity.caller(request.scope)
        session_id = _session_id(request)
        return json_response(await self._gateway.sessions.history(caller.tenant, session_id))

    async def delete(self, request: Request) -> Response:
        """Forget it, and what requests that still run would add to it."""
        caller = await self._gateway.identity.caller(request.scope)
        session_id = _session_id(request)
        await self._gateway.sessions.delete(caller.tenant, session_id)
        return json_response(SessionDeleted(id=session_id, object="session", deleted=True))


def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    if not 1 <= len(session_id) <= MAX_LABEL_CHARACTERS:
        raise SessionNotFoundError
    return session_id
