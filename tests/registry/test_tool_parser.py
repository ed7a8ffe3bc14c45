"""Tool calls in a text, for any pieces of the text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats import (
    ArgumentsPiece,
    CallPiece,
    ContentPiece,
    Piece,
    ToolCallParser,
)
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat

HERMES, LLAMA3 = ToolFormat.HERMES, ToolFormat.LLAMA3
PYTHONIC, QWEN = ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER

# Bits of calls and of what only looks like one.
BITS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"a": [1, {"b": "}<\\" "}]}}',
    '{"parameters": {}, "type": "function", "name": "g-1"}',
    '{"name": "f"',
    '"arguments": "{\\"a\\": 1}"}',
    '{"a": 1}',
    "null",
    "{",
    "}",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    " ",
    "\n\n",
    "<",
    "Hi.",
    "你",
    '"id": "<tool_call>' + "x" * 300,
    "n" * 70,
    "[TOOL_CALLS]",
    "[TOOL_",
    "[ARGS]",
    "[CALL_ID]",
    "abcDEF123",
    "f",
    "[",
    "(",
    ")",
    "a=",
    "'",
    "\\u00e",
    "-1.5",
    "True",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "```",
    "json",
    "[f(a=1, b='x\\'\"', c=[None, {'d': (1,)}])]",
)
texts = st.one_of(st.lists(st.sampled_from(BITS), max_size=14).map("".join), st.text(max_size=30))
# A text without these has no calls.
SIGNS = ("name", "<function=", "[TOOL_CALLS]", "<tool_call>", "begin", "a=", "()")
formats = st.sampled_from(list(ToolFormat))


class Read:
    """Pieces of a parsed text, with pieces of the same kind joined."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.content = ""
        self.calls: list[list[str]] = []
        # The order in which content and calls came.
        self.order = ""
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                assert piece.text
                self.content += piece.text
                self.order += "" if self.order.endswith("t") else "t"
            elif isinstance(piece, CallPiece):
                assert piece.call == len(self.calls)
                assert piece.call_id == f"call-{piece.call}"
                self.calls.append([piece.name, ""])
                self.order += "c"
            else:
                assert piece.text
                assert piece.call == len(self.calls) - 1
                self.calls[-1][1] += piece.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def parser(tool_format: ToolFormat, *, must_call: bool = False) -> ToolCallParser:
    numbers = itertools.count()
    return ToolCallParser(tool_format, lambda: f"call-{next(numbers)}", must_call=must_call)


def read(tool_format: ToolFormat, *chunks: str, finish: bool = True) -> Read:
    reader = parser(tool_format)
    pieces = [piece for chunk in chunks for piece in reader.push(chunk)]
    return Read(pieces + reader.finish() if finish else pieces)


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'<tool_call>\n{{"name": "{name}", "{key}": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello, <b>you</b>. ", "Hello, <b>you</b>. ", []),
        ("", "", []),
        (" \n", " \n", []),
        (call("f", '{"a": 1}'), "", [["f", '{"a": 1}']]),
        (f"I look.\n\n{call('f', '{}')}\n", "I look.", [["f", "{}"]]),
        (f"{call('f', '{}')}\n{call('g', '{ }')}", "", [["f", "{}"], ["g", "{ }"]]),
        (f"\n {call('f', '{}')} Done <i>.", "Done <i>.", [["f", "{}"]]),
        (call("f", '{"a": "</tool_call>"}'), "", [["f", '{"a": "</tool_call>"}']]),
        (call("f", '{"a": {"b": [[], {}]}}', "parameters"), "", [["f", '{"a": {"b": [[], {}]}}']]),
        (
            '<tool_call>{"type":"function","id":7,"arguments":{"a":"\\""},"name":"f"}</tool_call>',
            "",
            [["f", '{"a":"\\""}']],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
        ('<tool_call>{"arguments": null, "name": "f"}', "", [["f", "{}"]]),
        (call("f", json.dumps('{"a": "\\n"}')), "", [["f", '{"a": "\\n"}']]),
        # Two in one pair of tags, and a tag that never comes.
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', "", [["f", "{}"], ["g", "{}"]]),
        ('<tool_call>{"name": "f"} More', "More", [["f", "{}"]]),
        ('<tool_call>{"name": "f"}</tool_', "", [["f", "{}"]]),
        # Cut off.
        ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [["f", '{"a": "b']]),
        ('Hm <tool_call>{"name": "f", "argum', 'Hm <tool_call>{"name": "f", "argum', []),
        ("Hm <tool_c", "Hm <tool_c", []),
        # Malformed JSON: its text belongs to the arguments.
        (
            '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> x',
            "x",
            [["f", '{"a": [1}}']],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', "", [["f", '{"a": 1']]),
        ('<tool_call>{"name": "f", "arguments": {"a": <b></to', "", [["f", '{"a": <b></to']]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>!', "!", [["f", "{}"]]),
        # No calls.
        ("<tool_call>f()</tool_call>", "<tool_call>f()</tool_call>", []),
        ('<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', []),
        ('<tool_call>{"name": ""}', '<tool_call>{"name": ""}', []),
        ('<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
        ('<tool_call>{"nom": "f"}', '<tool_call>{"nom": "f"}', []),
        ("<tool_call>{}", "<tool_call>{}", []),
        ('<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', []),
        ('<tool_call>{"arguments": {]', '<tool_call>{"arguments": {]', []),
        (call("f", "[1]"), call("f", "[1]"), []),
        (call("f", '"[1]"'), call("f", '"[1]"'), []),
        (call("f", "true"), call("f", "true"), []),
        ('<tool_call>{"id": {}, "name": "f"}', '<tool_call>{"id": {}, "name": "f"}', []),
        ('<tool_call>{"name": "f", "name": "g"}', '<tool_call>{"name": "f", "name": "g"}', []),
        # The first tag was none, the second is one.
        (f"<tool_call> {call('f', '{}')}", "<tool_call>", [["f", "{}"]]),
    ],
)
def test_hermes(text: str, content: str, calls: list[list[str]]) -> None:
    parsed = read(HERMES, text)
    assert (parsed.content, parsed.calls) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello {you}. ", "Hello {you}. ", []),
        ("", "", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
        ('\n<|python_tag|>{"name": "f", "parameters": {}}\n', "", [["f", "{}"]]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [["f", "{}"]]),
        ('{"name": "f"}; {"name": "g"}', "", [["f", "{}"], ["g", "{}"]]),
        ('{"name": "f"}\n{"name": "g"};', "", [["f", "{}"], ["g", "{}"]]),
        ('{"name": "f"}; so', "; so", [["f", "{}"]]),
        ('{"name": "f"} so', "so", [["f", "{}"]]),
        ('{"name": "f"}; {"x": 1}', '; {"x": 1}', [["f", "{}"]]),
        ('{"name": "f", "parameters": {"a": [}}', "", [["f", '{"a": [}}']]),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        (' {"name": "Ada", "age": 7}', ' {"name": "Ada", "age": 7}', []),
        ('{"name": "Ada"', '{"name": "Ada"', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|python_", "<|python_", []),
        ('Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', []),
        (call("f", "{}"), call("f", "{}"), []),
    ],
)
def test_llama3(text: str, content: str, calls: list[list[str]]) -> None:
    parsed = read(LLAMA3, text)
    assert (parsed.content, parsed.calls) == (content, calls)


@given(formats, texts, st.data())
def test_however_it_is_cut(tool_format: ToolFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ends = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(ends)]
    for upto in range(len(chunks) + 1):
        whole = "".join(chunks[:upto])
        for finish in (False, True):
            expected = read(tool_format, whole, finish=finish)
            assert read(tool_format, *chunks[:upto], finish=finish) == expected
            assert read(tool_format, *whole, finish=finish) == expected


@given(formats, texts)
def test_what_has_come_out_is_never_taken_back(tool_format: ToolFormat, text: str) -> None:
    parsed = read(tool_format, text)
    for end in range(len(text)):
        before = read(tool_format, text[:end], finish=False)
        assert parsed.content.startswith(before.content)
        assert parsed.order.startswith(before.order)
        for early, late in zip(before.calls, parsed.calls, strict=False):
            assert early[0] == late[0]
            assert late[1].startswith(early[1])


@given(formats, texts.filter(lambda text: not any(sign in text for sign in SIGNS)))
def test_a_text_without_calls_comes_out_as_it_is(tool_format: ToolFormat, text: str) -> None:
    assert read(tool_format, *text).content == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.text(max_size=8)
keywords = st.from_regex(r"\w[\w-]{0,7}", fullmatch=True)
# Formats that do not write arguments in JSON, and the names that these may have there.
KEYS = dict.fromkeys((ToolFormat.PYTHONIC, ToolFormat.QWEN3_CODER, ToolFormat.GLM45), keywords)
KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    list: "array",
    dict: "object",
    type(None): "null",
}
contents = st.sampled_from(["", "Let me see.", "a <b> c", "<tool_cal", "[TOOL"])


@given(formats, st.data(), contents, st.booleans())
def test_calls_come_back_as_they_were_made(
    tool_format: ToolFormat, data: st.DataObject, content: str, ascii_only: bool
) -> None:
    names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
    objects = st.dictionaries(KEYS.get(tool_format, keys), json_values, max_size=3)
    calls = st.lists(
        st.tuples(names, objects), min_size=1, max_size=4, unique_by=lambda one: one[0]
    )
    made = data.draw(calls)
    tools = [
        ToolDefinition(
            name=name,
            parameters={"properties": {key: {"type": KINDS[type(x)]} for key, x in value.items()}},
        )
        for name, value in made
    ]
    written = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in made]
    text: str = calls_as_text(
        [ToolCall(id="", name=name, arguments=arguments) for name, arguments in written],
        tool_format,
    )
    if tool_format in (ToolFormat.LLAMA3, ToolFormat.PYTHONIC):
        content = ""
    else:
        text = f"{content}\n{text}"
    numbers = itertools.count()
    reader = ToolCallParser(tool_format, lambda: f"call-{next(numbers)}", tools)
    parsed = Read([*(piece for one in text for piece in reader.push(one)), *reader.finish()])
    assert parsed.content == content
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == made
    if tool_format not in KEYS:
        assert parsed.calls == [list(one) for one in written]


@given(formats, st.data())
def test_calls_that_are_cut_off_leak_nothing(tool_format: ToolFormat, data: st.DataObject) -> None:
    arguments = json.dumps({"a": data.draw(json_values), "b": "<x>[y](z)"})
    calls = [ToolCall(id="", name="f-1", arguments=arguments)] * 2
    text = calls_as_text(calls, tool_format)
    end = data.draw(st.integers(0, len(text)))
    reader = parser(tool_format, must_call=True)
    parsed = Read([*reader.push(text[:end]), *reader.finish()])
    assert parsed.content == ""
    assert {name for name, _ in parsed.calls} <= {"f-1"}


@given(formats, st.data())
def test_a_cut_call_is_told_from_a_whole_one(tool_format: ToolFormat, data: st.DataObject) -> None:
    arguments = json.dumps({"a": data.draw(json_values), "b": "<x>[y](z)"})
    calls = [ToolCall(id="", name="f-1", arguments=arguments)] * 2
    text = calls_as_text(calls, tool_format)
    end = data.draw(st.integers(0, len(text)))
    reader = parser(tool_format, must_call=True)
    parsed = Read([*reader.push(text[:end]), *reader.finish(is_cut_off=True)])
    *earlier, last = [arguments for _, arguments in parsed.calls] or ["{}"]
    assert all(isinstance(json.loads(one), dict) for one in earlier)
    assert reader.is_last_call_cut is (not _is_object(last))
    assert reader.is_cut_in_call >= reader.is_last_call_cut
    assert last.startswith("{")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_malformed_arguments_are_cut_only_where_the_text_is() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1]'
    for is_cut_off in (False, True):
        reader = parser(HERMES)
        reader.push(text)
        reader.finish(is_cut_off=is_cut_off)
        assert reader.is_last_call_cut is is_cut_off


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        (HERMES, "<tool_call>", ""),
        (HERMES, 'Hm. <tool_call>{"na', "Hm."),
        (HERMES, "Hm. <tool_c", "Hm. <tool_c"),
        (HERMES, "Write <tool_call> there", "Write <tool_call> there"),
        (LLAMA3, "<|python_tag|>", ""),
        (LLAMA3, '<|python_tag|>{"name": "f", "par', ""),
        (LLAMA3, '{"name": "f", "par', '{"name": "f", "par'),
        (PYTHONIC, "<|python_start|>[f(", ""),
        (PYTHONIC, "[f", "[f"),
        (QWEN, "<function=", ""),
    ],
)
def test_what_a_tag_begins_is_no_content_where_it_was_cut_off(
    tool_format: ToolFormat, text: str, content: str
) -> None:
    for chunks in ([text], list(text)):
        reader = parser(tool_format)
        pieces = [piece for chunk in chunks for piece in reader.push(chunk)]
        parsed = Read([*pieces, *reader.finish(is_cut_off=True)])
        assert (parsed.content, parsed.calls) == (content, [])


def test_a_tag_that_a_model_ends_with_is_content() -> None:
    assert read(HERMES, "Write <tool_call>").content == "Write <tool_call>"


def test_arguments_come_as_they_are_written() -> None:
    reader = parser(HERMES)
    assert reader.push('Hm. <tool_call>{"name": "f", "arguments": ') == [ContentPiece("Hm.")]
    assert reader.push('{"a":') == [CallPiece(0, "call-0", "f"), ArgumentsPiece(0, '{"a":')]
    assert reader.push(" 1") == [ArgumentsPiece(0, " 1")]
    assert reader.push("}}") == [ArgumentsPiece(0, "}")]
    assert reader.num_calls == 1


def test_json_that_is_no_call_is_known_by_its_first_strange_key() -> None:
    reader = parser(LLAMA3)
    assert reader.push('{"ci') == []
    assert reader.push('ty"') == [ContentPiece('{"city"')]
    assert reader.push(": ") == [ContentPiece(": ")]
