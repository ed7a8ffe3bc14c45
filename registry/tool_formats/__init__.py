"""Tool calls in the formats of models: described to the model, forced by a grammar, parsed from its
text.
"""

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
