"""Tools of OpenAI's type ``custom``, whose input is a text and may have a grammar."""

from __future__ import annotations

from millrace.registry.requests.offered.offered_tools import GivenTool
from millrace.registry.tool_formats.freeform import PARAMETERS
from millrace.registry.tool_formats.lark.grammar import pattern_of_lark, pattern_of_regex
from millrace.registry.tool_formats.lark.plain_pattern import NoPatternError, NotKeptError
from millrace.registry.tool_formats.lark.reader import LarkSyntaxError
from millrace.schemas.errors import ParameterError
from millrace.schemas.notices import NoticeCode, Notices, notice
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS
from millrace.schemas.tools import ToolDefinition

CUSTOM = "custom"
_HINT = "Give the whole text as the one argument input."
_OF_SYNTAX = {
    "lark": "It must match this grammar in Lark's notation:",
    "regex": "It must match this regular expression:",
}


def freeform_tool(
    where: str,
    name: str,
    description: str,
    *,
    syntax: str = "",
    definition: str = "",
    definition_field: str = "",
    namespace: str = "",
    told_name: str = "",
) -> GivenTool:
    """Make a custom tool, with a grammar if there is a ``syntax``. The model knows the tool by
    ``told_name``, or by ``name`` if that is empty. A grammar that cannot be kept is told to the
    model and named in a notice. Raises ParameterError for a text that is not a grammar."""
    told = [description.strip(), _HINT]
    pattern, notices = "", Notices()
    if syntax:
        told.append(f"{_OF_SYNTAX[syntax]}\n{definition}")
        pattern, notices = _pattern(syntax, definition, definition_field, name)
    return GivenTool(
        where=where,
        type=CUSTOM,
        name=name,
        namespace=namespace,
        definition=ToolDefinition(
            name=told_name or name,
            description="\n".join(filter(None, told)),
            parameters=PARAMETERS,
        ),
        pattern=pattern,
        notices=notices,
    )


def _pattern(syntax: str, definition: str, field: str, name: str) -> tuple[str, Notices]:
    if not 1 <= len(definition) <= MAX_GRAMMAR_CHARACTERS:
        raise ParameterError(field, f"{field} must have 1 to {MAX_GRAMMAR_CHARACTERS} characters.")
    try:
        if syntax == "lark":
            return pattern_of_lark(definition), ()
        return pattern_of_regex(definition), ()
    except (LarkSyntaxError, NoPatternError) as error:
        raise ParameterError(field, f"{field} cannot be read: {error}.") from error
    except NotKeptError as error:
        return "", (notice(NoticeCode.GRAMMAR_NOT_KEPT, field, f"{name}: {error}"),)
