"""``GET /v1/tools``: the tools that the gateway runs itself."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.tenancy.caller import Caller
from gateway.tools.runner import ToolRunner
from gateway.transport.http import Scope, json_response


class IdentityLike(Protocol):
    """``gateway.tenancy.identity.Identity``."""

    async def caller(self, scope: Scope) -> Caller: ...


class ToolsGateway(Protocol):
    """What the endpoint needs of the gateway."""

    @property
    def identity(self) -> IdentityLike: ...

    @property
    def tools(self) -> ToolRunner: ...


class ToolsApi:
    """A Starlette endpoint over one gateway's tools."""

    def __init__(self, gateway: ToolsGateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [Route("/v1/tools", self.tools, methods=["GET"])]

    async def tools(self, request: Request) -> Response:
        """What a request may name in ``server_tools``; where they lead is not told."""
        await self._gateway.identity.caller(request.scope)
        listed = [
            {
                "name": tool.name,
                "object": "tool",
                "description": tool.definition.description,
                "parameters": tool.definition.parameters,
            }
            for tool in self._gateway.tools.catalogue
        ]
        return json_response({"object": "list", "data": listed})
