"""Runners of one tool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from millrace.gateway.tools.catalogue import load_tools
from millrace.gateway.tools.network import Resolve, resolve
from millrace.gateway.tools.runner import ToolResult, ToolRunner
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import GatewayConfig

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "Łódź", "days": 2}'
SECRET = "s3cr3t-value"


@asynccontextmanager
async def runner(
    folder: Path,
    tool: Mapping[str, Any],
    resolver: Resolve = resolve,
    env: Mapping[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[ToolRunner]:
    """A runner of one tool, ``weather``."""
    file = folder / "tools.yaml"
    entry = {"parameters": WEATHER, "allow_private": True} | dict(tool)
    file.write_text(yaml.safe_dump({"tools": {"weather": entry}}))
    tools = load_tools(str(file), env or {})
    running = ToolRunner(tools, GatewayConfig(**config), SystemClock(), resolver)
    try:
        yield running
    finally:
        await running.close()


async def outcome(
    folder: Path, tool: Mapping[str, Any], arguments: str = ARGUMENTS, **settings: Any
) -> ToolResult:
    async with runner(folder, tool, **settings) as running:
        return await running.run("weather", arguments)
