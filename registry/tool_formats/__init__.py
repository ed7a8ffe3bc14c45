"""Tool calls as models write them: told to the model, forced by a grammar, read from its text."""

from millrace.registry.tool_formats.conversation import new_call_id
from millrace.registry.tool_formats.dropped import Dropped, DroppedKeyword
from millrace.registry.tool_formats.grammar import call_grammar
from millrace.registry.tool_formats.parser import (
    ArgumentsPiece,
    CallPiece,
    ContentPiece,
    Piece,
    ToolCallParser,
)

__all__ = [
    "ArgumentsPiece",
    "CallPiece",
    "ContentPiece",
    "Dropped",
    "DroppedKeyword",
    "Piece",
    "ToolCallParser",
    "call_grammar",
    "new_call_id",
]
