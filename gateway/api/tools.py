"""``GET /v1/tools``: the tools that the gateway runs itself."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.core import Gateway
from millrace.gateway.transport.http import json_response


class ServerTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the gateway runs itself. ``parameters`` is the JSON Schema of its arguments."""

    name: str
    object: Literal["tool"]
    description: str
    parameters: dict[str, Any] | None


class ServerToolList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    data: tuple[ServerTool, ...]


class ToolsApi:
    """A Starlette endpoint over one gateway's tools."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [Route("/v1/tools", self.tools, methods=["GET"])]

    async def tools(self, request: Request) -> Response:
        """What a request may name in ``server_tools``; where they lead is not told."""
        await self._gateway.identity.caller(request.scope)
        listed = tuple(
            ServerTool(
                name=tool.name,
                object="tool",
                description=tool.definition.description,
                parameters=tool.definition.parameters,
            )
            for tool in self._gateway.tools.catalogue
        )
        return json_response(ServerToolList(object="list", data=listed))
