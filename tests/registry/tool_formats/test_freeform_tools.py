"""Tools with text as their input: declared with one argument, held to a grammar, parsed as it
arrives."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.registry.tool_formats import (
    ArgumentsPiece,
    ToolCallParser,
    call_grammar,
)
from millrace.registry.tool_formats.freeform import (
    PARAMETERS,
    InputReader,
    arguments_of_input,
    input_of,
)
from millrace.registry.tool_formats.lark.grammar import pattern_of_lark, pattern_of_regex
from millrace.registry.tool_formats.lark.plain_pattern import NoPatternError, NotKeptError
from millrace.registry.tool_formats.lark.reader import LarkSyntaxError
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.tools import ToolCall, ToolChoice, ToolDefinition, ToolFormat, ToolMode
from tests.registry.test_tool_grammar import REQUIRED, WEATHER, demo, drawn, formats, library

# The grammar of Codex's tool apply_patch.
APPLY_PATCH = """\
start: begin_patch environment_id? hunk+ end_patch
environment_id: "*** Environment ID: " filename LF
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
# As the guides of OpenAI's API show it.
ARITHMETIC = """\
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
LIST = """\
start: list
list: item
    | list "," item
?item.2: INT | "x"i~2..3
INT: D+
D: /[0-9]/
%import common.WS -> _W
%ignore _W  // blanks
"""
PATCH = '*** Begin Patch\n*** Add File: a "b" \\n.txt\n+grün\t\\\n+\n*** End Patch\n'
NO_PATCH = "*** Begin Patch\n*** Add File: a.txt\nno plus\n*** End Patch\n"
TOOL = ToolDefinition(name="edit", parameters=PARAMETERS)


def _fits(grammar: str, text: str) -> bool:
    return re.fullmatch(pattern_of_lark(grammar), text) is not None


@given(text=st.text(), cuts=st.sets(st.integers(0, 200)), ascii_only=st.booleans())
def test_the_input_is_read_however_its_arguments_are_cut(
    text: str, cuts: set[int], ascii_only: bool
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=len(cuts) % 3 or None)
    places = [0, *sorted(cut for cut in cuts if cut < len(arguments)), len(arguments)]
    reader = InputReader()
    pieces = [arguments[a:b] for a, b in itertools.pairwise(places)]
    assert "".join(map(reader.feed, pieces)) == text
    assert input_of(arguments_of_input(text)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("plain words", "plain words"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "cut in \\', "cut in "),
        ('{"input": "cut in \\u12', "cut in "),
        ('{"inp', ""),
        ('{"input": "a\\qb\\ud800c\\uZ"}', "a\\qb\N{REPLACEMENT CHARACTER}c\\uZ"),
        ('{"input": "a", "more": 1}', "a"),
        ("{" + " " * 99 + '"input": "a"}', "{" + " " * 99 + '"input": "a"}'),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_arguments_of_another_form(arguments: str, text: str, size: int) -> None:
    reader = InputReader()
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    assert "".join(map(reader.feed, pieces)) == text


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (APPLY_PATCH, [PATCH, PATCH[:-1]], [NO_PATCH, PATCH + "\n", ""]),
        (
            ARITHMETIC,
            ["4 + 4", "1 * 22 + 3"],
            ["4+4", "4 + ", "a"],
        ),
        (
            LIST,
            ["1", "12 , xX,\n3 ", "xxx"],
            ["1 2", "x", ",1", "1,", "1 x x"],
        ),
        ('start: "a" start | "b"', ["b", "aab"], ["a", "ba"]),
        ('start: ["[" "]"] tail?\ntail: "." | tail "!"', ["", "[].!!", "."], ["[]!", "["]),
        (r'start: /[^"\\\/^$]+/ "$^\\"', ["ab$^\\"], ["$^\\", "a^$^\\", 'a"$^\\']),
        ("start: A B\nA: /a|b/\nB: /c.d/s", ["ac\nd", "bcxd"], ["acd", "b"]),
    ],
)
def test_regular_grammars_are_regular_expressions(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not _fits(grammar, text)] == []
    assert [text for text in bad if _fits(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: sum\nsum: "1" | "(" sum ")"', "the rule sum refers to itself in its middle"),
        ('start: "a" start', "no text of bounded length"),
        ("start: /(?=a)b/", "looks around"),
        (r"start: /(a)\1/", r"\1 stands within"),
        ("start: /a^b/", "^ stands within"),
        ("%import python.NAME\nstart: NAME", "only the library common"),
        ("%declare X\nstart: X", "%declare is not known"),
        ('start: a{"x"}\na{y}: y', "templates are not known"),
        (
            "start: x0\n"
            + "".join(f'x{i}: "a" x{i + 1} | "b" x{i + 1}\n' for i in range(40))
            + 'x40: "c" | x0',
            "too many ways",
        ),
        (
            "start: x0\n" + "".join(f"x{i}: x{i + 1}\n" for i in range(600)) + "x600: /a/",
            "512 rules",
        ),
        ("start: " + '"a" ' * 4_093, "it is too long"),
        ("start: /" + "a" * 17_000 + "/", "16384 characters"),
        (
            "start: x0\n" + "".join(f"x{i}: x{i + 1}\n" for i in range(500)) + "x500: x0",
            "too deeply",
        ),
        ("start: a a a a a\na: /" + "x" * 4_000 + "/", "too large"),
    ],
)
def test_what_no_regular_expression_keeps(grammar: str, why: str) -> None:
    with pytest.raises(NotKeptError, match=re.escape(why)):
        pattern_of_lark(grammar)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: b", "line 1: there is no rule b"),
        ('begin: "a"', "it has no rule start"),
        ('start: "a"\nstart: "b"', "line 2: there are two rules start"),
        ('start "a"', "line 1: '\"a\"' is not expected there"),
        ('start: ("a"', "line 1: the end is not expected there"),
        ('start: "a', "line 1: '\"a' is not understood"),
        ('start: "a"~1001', "line 1: a count is between 0 and 1000"),
        ('start: "a"~' + "9" * 5000, "line 1: a count is between 0 and 1000"),
        ("", "it has no rule start"),
    ],
)
def test_what_is_no_grammar(grammar: str, why: str) -> None:
    with pytest.raises(LarkSyntaxError, match=re.escape(why)):
        pattern_of_lark(grammar)


@pytest.mark.parametrize("pattern", ["(?<=a)b", r"\bword\b", "a(?x)b", r"(a)\1", "a^b"])
def test_regular_expressions_that_are_not_kept(pattern: str) -> None:
    with pytest.raises(NotKeptError):
        pattern_of_regex(pattern)


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "a\\", "(?:[a)]"])
def test_what_is_no_regular_expression(pattern: str) -> None:
    with pytest.raises(NoPatternError):
        pattern_of_regex(pattern)
    with pytest.raises((NoPatternError, LarkSyntaxError)):
        pattern_of_lark(f"start: /{pattern}/")


@formats
@pytest.mark.parametrize(
    "pattern", [pattern_of_lark('start: "<" /[\\w"\\\\\\n]{0,3}/ "\\n"~1..2'), "^a/[$^]|\\d\\/$"]
)
def test_forced_input_matches(tool_format: ToolFormat, pattern: str) -> None:
    pattern = pattern if pattern.startswith("^(?:") else pattern_of_regex(pattern)
    made = call_grammar(tool_format, [TOOL], REQUIRED, False, patterns={"edit": pattern})
    assert made is not None
    for seed in range(6):
        said = drawn(made, seed)
        arguments = _arguments(said, tool_format)
        assert re.fullmatch(pattern, input_of(arguments)), said


@formats
@pytest.mark.parametrize("choice", [ToolChoice(), REQUIRED])
def test_a_patch_is_the_only_input(tool_format: ToolFormat, choice: ToolChoice) -> None:
    patterns = {"edit": pattern_of_lark(APPLY_PATCH)}
    made = call_grammar(tool_format, [TOOL, WEATHER], choice, True, patterns=patterns)
    assert made is not None
    matcher = library().compile(made)
    good, bad = (_tokens(tool_format, text) for text in (PATCH.rstrip("\n"), NO_PATCH))
    assert matcher.num_fitting(good) == len(good)
    assert matcher.num_fitting(bad) < len(bad)


@pytest.mark.parametrize(
    ("choice", "parallel", "held"),
    [(ToolChoice(), True, False), (ToolChoice(), False, True), (REQUIRED, True, True)],
)
def test_other_tools_are_held_where_they_are_without_it(
    choice: ToolChoice, parallel: bool, held: bool
) -> None:
    patterns = {"edit": "^a$"}
    made = call_grammar(ToolFormat.HERMES, [TOOL, WEATHER], choice, parallel, patterns=patterns)
    assert made is not None
    assert ('"maxLength": 8' in made.text) == held


def test_without_a_grammar_the_completion_stays_free() -> None:
    tools = [TOOL, WEATHER]
    assert call_grammar(ToolFormat.HERMES, tools, ToolChoice(), True, patterns={"edit": ""}) is None
    named = ToolChoice(mode=ToolMode.NAMED, name="edit")
    assert call_grammar(ToolFormat.HERMES, tools, named, True, patterns={"edit": ""}) is not None


def _arguments(said: str, tool_format: ToolFormat) -> str:
    parser = ToolCallParser(tool_format, lambda: "id", [TOOL], must_call=True)
    pieces = [*parser.push(said), *parser.finish()]
    return "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))


def _tokens(tool_format: ToolFormat, text: str) -> Sequence[int]:
    call = ToolCall(id="123456789", name="edit", arguments=arguments_of_input(text))
    said = calls_as_text([call], tool_format)
    return demo().tokenizer.encode(said, add_special_tokens=False)
