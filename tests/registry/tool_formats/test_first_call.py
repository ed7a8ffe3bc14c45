"""End of a completion's first call, in every format and however its text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser
from millrace.registry.tool_formats.first_call import FirstCall
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolCall, ToolFormat

ARGUMENTS = {"text": 'a "}" ]) </tool_call> Łódź', "number": 7}
CALLS = [ToolCall(id="", name=name, arguments=json.dumps(ARGUMENTS)) for name in "fg"]
# The whole answer is calls in these.
WITHOUT_CONTENT = (ToolFormat.LLAMA3, ToolFormat.PYTHONIC)


def cut(sampling: SamplingOptions, pieces: list[str]) -> str | None:
    """Return the text up to the end of its first call."""
    first, told = FirstCall(sampling), ""
    for piece in pieces:
        end = first.num_characters(piece)
        if end is not None:
            return told + piece[:end]
        told += piece
    return None


def pieces_of(text: str, places: set[int]) -> list[str]:
    cuts = sorted({0, len(text), *(place % len(text) for place in places)})
    return [text[i:j] for i, j in itertools.pairwise(cuts)]


@pytest.mark.parametrize("tool_format", list(ToolFormat))
@given(places=st.sets(st.integers(0, 1_000), max_size=12))
def test_a_text_ends_behind_its_first_call(tool_format: ToolFormat, places: set[int]) -> None:
    before = "" if tool_format in WITHOUT_CONTENT else "Let me see. "
    text = before + str(calls_as_text(CALLS, tool_format))
    sampling = SamplingOptions(one_call=tool_format)
    kept = cut(sampling, pieces_of(text, places))
    assert kept is not None
    assert kept == cut(sampling, [text])
    parser = ToolCallParser(tool_format, lambda: "")
    made = [*parser.push(kept), *parser.finish()]
    assert [piece.name for piece in made if isinstance(piece, CallPiece)] == ["f"]
    arguments = "".join(piece.text for piece in made if isinstance(piece, ArgumentsPiece))
    assert json.loads(arguments)["text"] == ARGUMENTS["text"]
    assert not parser.is_last_call_cut
    assert not parser.is_cut_in_call


def test_thoughts_and_prose_hold_no_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    thinks = SamplingOptions(one_call=ToolFormat.HERMES, reasoning=ReasoningFormat())
    text = f"<think>{call}</tool_call></think>\n\nSo: {call}</tool_call> and more"
    assert (
        cut(thinks, [text]) == cut(thinks, list(text)) == text.partition("So: ")[0] + f"So: {call}"
    )
    plain = SamplingOptions(one_call=ToolFormat.HERMES)
    for prose in ("<tool_call> is a tag", '<tool_call>{"name": "f"', '{"name": "f"}', "Hi."):
        assert cut(plain, [prose]) is None
