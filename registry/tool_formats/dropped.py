"""Keywords of tools' schemas that grammars do not enforce."""

from __future__ import annotations

from typing import NamedTuple

from millrace.registry.json_schemas.keeping import Unkept
from millrace.schemas.errors import ParameterError
from millrace.schemas.tools import ToolDefinition


class DroppedKeyword(NamedTuple):
    """Keyword in the parameters of a tool that its calls need not satisfy.

    ``path`` is its place in the parameters; empty for the root.
    """

    tool: str
    path: str
    keyword: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.tool, self.path, self.keyword)))


class Dropped:
    """Collector of dropped keywords of tools that are not strict. A strict tool is refused."""

    def __init__(self) -> None:
        self.keywords: list[DroppedKeyword] = []

    def add(self, tool: ToolDefinition, unkept: Unkept) -> None:
        """Add a keyword. Raises ParameterError for a strict tool."""
        if tool.strict:
            raise refusal(tool, unkept)
        found = DroppedKeyword(tool.name, unkept.path, unkept.keyword)
        if found not in self.keywords:
            self.keywords.append(found)


def refusal(tool: ToolDefinition, unkept: Unkept) -> ParameterError:
    """Return the error that names the tool, the place in its schema and the keyword."""
    place = f"parameters.{unkept.path}" if unkept.path else "parameters"
    return ParameterError(
        "tools",
        f"{unkept.keyword!r:.80} of {place} of the {'strict ' if tool.strict else ''}tool "
        f"{tool.name} cannot be kept: {unkept.why}.",
    )
