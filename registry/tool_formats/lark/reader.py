"""Parser for the subset of Lark's grammar notation that describes the input of tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from millrace.registry.tool_formats.lark.plain_pattern import (
    NotKeptError,
    literal_pattern,
    plain_pattern,
)


class LarkSyntaxError(ValueError):
    """Text that is not a valid grammar; the message names the line."""


class Pattern(NamedTuple):
    """Node for texts that match a regular expression."""

    text: str


class Reference(NamedTuple):
    """Node for the rule or terminal ``name``."""

    name: str


class Series(NamedTuple):
    """Node for a sequence of nodes."""

    nodes: tuple[Node, ...]


class Alternatives(NamedTuple):
    """Node for alternatives, of which one matches."""

    nodes: tuple[Node, ...]


class Repeated(NamedTuple):
    """Node repeated ``least`` to ``most`` times; None: without an upper bound."""

    node: Node
    least: int
    most: int | None


Node = Pattern | Reference | Series | Alternatives | Repeated


class LarkGrammar(NamedTuple):
    """Rules and terminals by name, and the patterns ignored between terminals."""

    rules: dict[str, Node]
    ignored: tuple[Node, ...]


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


_TOKENS = re.compile(
    r"""
    (?P<blank>[ \t\r\f]+|//[^\n]*|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-zA-Z]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<percent>%[a-z_]+)
    |(?P<name>[!?]?_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<number>-?\d+)
    |(?P<mark>->|\.\.|[:|()\[\]{}?*+~,.&])
    """,
    re.VERBOSE,
)
_STRING_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_STRING_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b"}
_MAX_DEPTH = 64
_MAX_TOKENS = 4_096
_MAX_DIGITS = 4
# The terminals of Lark's library ``common``.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[\-+]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+(?:[eE][\-+]?[0-9]+)|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][\-+]?[0-9]+)?)",
    "NUMBER": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][\-+]?[0-9]+)?)",
    "SIGNED_NUMBER": r"[\-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][\-+]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\x5c\n]|\x5c.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"\#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}


def read_lark(text: str) -> LarkGrammar:
    """Parse a grammar.

    Raises:
        LarkSyntaxError: the grammar is invalid, or a rule is undefined.
        NotKeptError: a feature of Lark is not supported.
    """
    reader = _Reader(list(islice(_tokens(text), _MAX_TOKENS)))
    reader.read()
    rules = reader.rules
    if "start" not in rules:
        raise LarkSyntaxError("it has no rule start")
    for name, line in reader.referred.items():
        if name not in rules:
            raise LarkSyntaxError(f"line {line}: there is no rule {name:.80}")
    return LarkGrammar(rules, tuple(reader.ignored))


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise LarkSyntaxError(f"line {line}: {text[at : at + 20]!r} is not understood")
        kind = found.lastgroup or ""
        if kind != "blank":
            yield _Token(kind, found.group(), line)
        line += kind == "newline"
        at = found.end()
    yield _Token("newline", "\n", line)
    yield _Token("end", "", line)


class _Reader:
    """Reader of statements. A line that begins with ``|`` continues the line before it."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.rules: dict[str, Node] = {}
        self.referred: dict[str, int] = {}
        self.ignored: list[Node] = []
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def read(self) -> None:
        while True:
            token = self._next()
            match token.kind:
                case "end":
                    return
                case "newline":
                    continue
                case "percent":
                    self._directive(token)
                case "name":
                    self._rule(token)
                case _:
                    raise _unexpected(token)

    def _directive(self, token: _Token) -> None:
        if token.text == "%ignore":
            self.ignored.append(self._alternatives())
        elif token.text == "%import":
            self._import()
        else:
            raise NotKeptError(f"line {token.line}: {token.text} is not known")
        self._end_statement()

    def _import(self) -> None:
        source = self._take("name")
        names: list[tuple[str, str]] = []
        if source.text != "common":
            raise NotKeptError(f"line {source.line}: only the library common is known")
        if self._takes("."):
            name = self._take("name").text
            names.append((name, self._take("name").text if self._takes("->") else name))
        else:
            self._expect("(")
            while not self._takes(")"):
                name = self._take("name").text
                names.append((name, name))
                self._takes(",")
        for name, alias in names:
            if name not in _COMMON:
                raise NotKeptError(f"line {source.line}: common.{name:.80} is not known")
            self.rules[alias] = Pattern(f"(?:{_COMMON[name]})")

    def _rule(self, token: _Token) -> None:
        name = token.text.lstrip("!?")
        if self._takes("."):
            self._take("number")
        if self._peek().text == "{":
            raise NotKeptError(f"line {token.line}: templates are not known")
        self._expect(":")
        if name in self.rules:
            raise LarkSyntaxError(f"line {token.line}: there are two rules {name:.80}")
        self.rules[name] = self._alternatives()
        self._end_statement()

    def _end_statement(self) -> None:
        token = self._next()
        if token.kind != "newline":
            raise _unexpected(token)

    def _alternatives(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotKeptError("its brackets are nested too deeply")
        nodes = [self._series()]
        while self._goes_on("|"):
            nodes.append(self._series())
        self._depth -= 1
        return nodes[0] if len(nodes) == 1 else Alternatives(tuple(nodes))

    def _goes_on(self, mark: str) -> bool:
        """Take ``mark``, possibly on a later line."""
        begin = self._at
        while self._peek().kind == "newline":
            self._at += 1
        if self._takes(mark):
            return True
        self._at = begin
        return False

    def _series(self) -> Node:
        nodes: list[Node] = []
        while True:
            token = self._peek()
            if token.text == "->":
                self._next()
                self._take("name")
                break
            if token.kind not in ("name", "string", "regex") and token.text not in ("(", "["):
                break
            nodes.append(self._counted(self._item()))
        return nodes[0] if len(nodes) == 1 else Series(tuple(nodes))

    def _item(self) -> Node:
        token = self._next()
        match token.kind:
            case "name":
                if token.text[0] in "!?":
                    raise _unexpected(token)
                self.referred.setdefault(token.text, token.line)
                return Reference(token.text)
            case "string":
                return self._string(token)
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return Pattern(plain_pattern(body, flags))
        inner = self._alternatives()
        while self._peek().kind == "newline":
            self._next()
        if token.text == "(":
            self._expect(")")
            return inner
        self._expect("]")
        return Repeated(inner, 0, 1)

    def _string(self, token: _Token) -> Node:
        ignore_case = token.text.endswith("i")
        text = _unescaped(token.text[1 : -2 if ignore_case else -1])
        if not self._takes(".."):
            return Pattern(literal_pattern(text, ignore_case=ignore_case))
        last = _unescaped(self._take("string").text[1:-1])
        if len(text) != 1 or len(last) != 1 or text > last:
            raise LarkSyntaxError(f"line {token.line}: a range has one character at each end")
        return Pattern(f"[\\x{{{ord(text):x}}}-\\x{{{ord(last):x}}}]")

    def _counted(self, node: Node) -> Node:
        token = self._peek()
        if token.text in ("?", "*", "+"):
            self._next()
            node = Repeated(node, int(token.text == "+"), 1 if token.text == "?" else None)
        elif self._takes("~"):
            least = self._number()
            node = Repeated(node, least, self._number() if self._takes("..") else least)
        elif self._takes("{"):
            if self._peek().kind != "number":
                raise NotKeptError(f"line {token.line}: templates are not known")
            least = self._number()
            most: int | None = least
            if self._takes(","):
                most = None if self._peek().text == "}" else self._number()
            self._expect("}")
            node = Repeated(node, least, most)
        return node

    def _number(self) -> int:
        token = self._take("number")
        digits = token.text.lstrip("0") or "0"
        # Python refuses to parse a number of thousands of digits.
        number = int(digits) if len(digits) <= _MAX_DIGITS else -1
        if not 0 <= number <= 1_000:
            raise LarkSyntaxError(f"line {token.line}: a count is between 0 and 1000")
        return number

    def _peek(self) -> _Token:
        if self._at >= len(self._tokens):
            raise NotKeptError("it is too long")
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._peek()
        self._at += token.kind != "end"
        return token

    def _take(self, kind: str) -> _Token:
        token = self._next()
        if token.kind != kind:
            raise _unexpected(token)
        return token

    def _takes(self, mark: str) -> bool:
        if self._peek().text != mark:
            return False
        self._next()
        return True

    def _expect(self, mark: str) -> None:
        token = self._next()
        if token.text != mark:
            raise _unexpected(token)


def _unexpected(token: _Token) -> LarkSyntaxError:
    if token.text == "&":
        raise NotKeptError(f"line {token.line}: & is not known")
    where = "the end" if token.kind in ("end", "newline") else repr(token.text[:40])
    return LarkSyntaxError(f"line {token.line}: {where} is not expected there")


def _unescaped(text: str) -> str:
    def character(found: re.Match[str]) -> str:
        mark = found[1]
        if len(mark) > 1:
            return chr(int(mark[1:], 16))
        return _STRING_ESCAPES.get(mark, mark)

    return _STRING_ESCAPE.sub(character, text)
