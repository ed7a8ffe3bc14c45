"""Lark grammars, translated to one regular expression.

The input of a freeform tool is a JSON string or stands between tags. The grammar library can
constrain such a string only by a regular expression, but handles its escapes. So a
grammar can be enforced only if it is regular: each rule refers to itself only at its end or only at
its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from millrace.registry.tool_formats.lark.plain_pattern import NotKeptError, plain_pattern
from millrace.registry.tool_formats.lark.reader import (
    Alternatives,
    Node,
    Pattern,
    Reference,
    Repeated,
    Series,
    read_lark,
)

MAX_PATTERN_CHARACTERS = 16_384
MAX_RULES = 512
# Limit of steps: rules that refer to one another are solved again on each path.
_MAX_STEPS = 4_000
START = "start"
_NOTHING: Mapping[str, str] = {}


class _Form:
    """Form of a node: the pattern ``fixed``, or ``variables[name]`` next to the text of the rule
    ``name``.

    ``fixed`` None: the node always contains a variable.
    """

    __slots__ = ("fixed", "variables")

    def __init__(self, fixed: str | None, variables: Mapping[str, str] = _NOTHING) -> None:
        self.fixed = fixed
        self.variables = variables
        for pattern in (fixed, *variables.values()):
            if pattern is not None and len(pattern) > MAX_PATTERN_CHARACTERS:
                raise NotKeptError("it is too large as a regular expression")


@lru_cache(maxsize=64)
def pattern_of_lark(text: str) -> str:
    """Return the regular expression that a whole text must match.

    Raises:
        LarkSyntaxError: the grammar is invalid.
        NoPatternError: a regular expression in it is invalid.
        NotKeptError: no regular expression can express the grammar.
    """
    _check_length(text)
    try:
        return _pattern_of_lark(text)
    except RecursionError:
        raise NotKeptError("its rules are nested too deeply") from None


def pattern_of_regex(text: str) -> str:
    """Return the regular expression that a whole text must match. Raises NotKeptError and
    NoPatternError.
    """
    _check_length(text)
    return f"^(?:{plain_pattern(text)})$"


def _check_length(text: str) -> None:
    if len(text) > MAX_PATTERN_CHARACTERS:
        raise NotKeptError(f"it has more than {MAX_PATTERN_CHARACTERS} characters")


def _pattern_of_lark(text: str) -> str:
    rules, to_ignore = read_lark(text)
    if len(rules) > MAX_RULES:
        raise NotKeptError(f"it has more than {MAX_RULES} rules")
    terminals = _Solver(rules)
    if not to_ignore:
        return f"^(?:{terminals.pattern_of(START)})$"
    ignored = _repeated(_one_of([terminals.pattern_of_node(node) for node in to_ignore]), 0, None)
    return f"^(?:{_Solver(rules, terminals, ignored).pattern_of(START)}{ignored})$"


class _Solver:
    """Solver of a grammar's rules by Arden's lemma: a rule ``x: "a" x | "b"`` is ``(?:a)*b``.

    The pattern ``ignored`` may precede each terminal; ``terminals`` solves the terminals.
    """

    def __init__(
        self, rules: Mapping[str, Node], terminals: _Solver | None = None, ignored: str = ""
    ) -> None:
        self._rules = rules
        self._terminals = terminals or self
        self._ignored = ignored
        self._solved: dict[str, str] = {}
        self._num_steps_left = _MAX_STEPS
        self._reached: dict[str, frozenset[str]] = {}
        self._named: dict[str, set[str]] = {}

    def pattern_of(self, name: str) -> str:
        known = self._solved.get(name)
        if known is None:
            try:
                form = self._solve(name, (), is_left=False)
            except _NotLinearError:
                try:
                    form = self._solve(name, (), is_left=True)
                except _NotLinearError:
                    raise NotKeptError(
                        f"the rule {name:.80} refers to itself in its middle"
                    ) from None
            if form.fixed is None:
                raise NotKeptError(f"the rule {name:.80} matches no text of bounded length")
            known = self._solved[name] = form.fixed
        return known

    def pattern_of_node(self, node: Node) -> str:
        """Return the pattern of a terminal without a name."""
        return self._form(node, (), is_left=False).fixed or ""

    def _solve(self, name: str, opened: tuple[str, ...], *, is_left: bool) -> _Form:
        """Return the form of a rule, without references to itself."""
        form = self._form(self._rules[name], (*opened, name), is_left=is_left)
        own = form.variables.get(name)
        if own is None:
            return form
        loop = _repeated(own, 0, None)
        join = _after if is_left else _before
        return _Form(
            join(loop, form.fixed),
            {
                other: _certain(join(loop, pattern))
                for other, pattern in form.variables.items()
                if other != name
            },
        )

    def _form(self, node: Node, opened: tuple[str, ...], *, is_left: bool) -> _Form:
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            raise NotKeptError("its rules refer to one another in too many ways")
        match node:
            case Pattern():
                return _Form(self._ignored + node.text)
            case Reference() if self._ignored and _is_terminal(node.name):
                return _Form(self._ignored + self._terminals.pattern_of(node.name))
            case Reference():
                return self._referred(node.name, opened, is_left=is_left)
            case Alternatives():
                return _either([self._form(one, opened, is_left=is_left) for one in node.nodes])
            case Series():
                forms = [self._form(one, opened, is_left=is_left) for one in node.nodes]
                return _in_series(forms, is_left=is_left)
            case Repeated():
                form = self._form(node.node, opened, is_left=is_left)
                if form.variables and (node.least, node.most) != (0, 1):
                    raise _NotLinearError
                if form.variables:
                    return _either([_Form(""), form])
                if form.fixed is None:
                    return _Form("" if not node.least else None)
                return _Form(_repeated(form.fixed, node.least, node.most))

    def _referred(self, name: str, opened: tuple[str, ...], *, is_left: bool) -> _Form:
        if name in opened:
            return _Form(None, {name: ""})
        if any(one in self._reach(name) for one in opened):
            return self._solve(name, opened, is_left=is_left)
        return _Form(self.pattern_of(name))

    def _reach(self, name: str) -> frozenset[str]:
        """Return the rules that a rule leads to."""
        known = self._reached.get(name)
        if known is None:
            found: set[str] = set()
            waiting = [name]
            while waiting:
                for other in self._named_in(waiting.pop()):
                    if other not in found:
                        found.add(other)
                        waiting.append(other)
            known = self._reached[name] = frozenset(found)
        return known

    def _named_in(self, name: str) -> set[str]:
        """Return the rules that a rule names itself."""
        known = self._named.get(name)
        if known is None:
            known = self._named[name] = _references(self._rules[name])
        return known


class _NotLinearError(Exception):
    """Rule that refers to itself in its middle or at both ends."""


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _references(node: Any) -> set[str]:
    if isinstance(node, Reference):
        return {node.name}
    if isinstance(node, Repeated):
        return _references(node.node)
    if isinstance(node, Alternatives | Series):
        return set().union(*map(_references, node.nodes))
    return set()


def _either(forms: list[_Form]) -> _Form:
    names = dict.fromkeys(name for form in forms for name in form.variables)
    variables = {
        name: _one_of([form.variables[name] for form in forms if name in form.variables])
        for name in names
    }
    fixed = [form.fixed for form in forms if form.fixed is not None]
    return _Form(_one_of(fixed) if fixed else None, variables)


def _in_series(forms: list[_Form], *, is_left: bool) -> _Form:
    if is_left:
        forms.reverse()
    join = _after if is_left else _before
    whole = _Form("")
    for form in forms:
        if whole.variables:
            if form.variables or form.fixed != "":
                raise _NotLinearError
            continue
        variables = {name: join(whole.fixed, text) for name, text in form.variables.items()}
        whole = _Form(
            join(whole.fixed, form.fixed),
            {name: text for name, text in variables.items() if text is not None},
        )
    return whole


def _before(first: str | None, then: str | None) -> str | None:
    return None if first is None or then is None else first + then


def _after(first: str | None, then: str | None) -> str | None:
    return _before(then, first)


def _certain(pattern: str | None) -> str:
    assert pattern is not None, "both parts are there"
    return pattern


def _one_of(patterns: list[str]) -> str:
    different = list(dict.fromkeys(patterns))
    if len(different) == 1:
        return different[0]
    filled = [pattern for pattern in different if pattern]
    return f"(?:{'|'.join(filled)})" + ("?" if len(filled) < len(different) else "")


def _repeated(pattern: str, least: int, most: int | None) -> str:
    if not pattern:
        return ""
    if most is None:
        count = "*" if not least else "+" if least == 1 else f"{{{least},}}"
    else:
        count = "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
    return f"(?:{pattern}){count}"
