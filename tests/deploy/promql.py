"""Parser of the part of PromQL that tells an expression's metrics, labels and functions."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<range>\[\d+[smhd](?::\d+[smhd])?\])
  | (?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
  | (?P<operator>==|!=|>=|<=|=~|!~|[-+*/%^<>=])
  | (?P<bracket>[(){},])
    """,
    re.VERBOSE,
)
_GROUPINGS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_SET_OPERATORS = frozenset({"and", "or", "unless", "bool"})
_FUNCTIONS = frozenset(
    {
        *("absent", "histogram_quantile", "increase", "max", "min", "rate", "sum", "time"),
        *("avg", "count", "clamp_min", "clamp_max", "topk"),
    }
)
_PAIRS = {")": "(", "}": "{"}


class Named(NamedTuple):
    metrics: set[str]
    labels: set[str]


class SyntaxProblemError(Exception):
    """Syntax error of an expression."""


def named_in(expression: str) -> Named:
    """Return the metrics, labels and functions that an expression names. Raise SyntaxProblemError
    for a malformed expression."""
    metrics: set[str] = set()
    labels: set[str] = set()
    open_brackets: list[tuple[str, bool]] = []
    tokens = _tokens(expression)
    for i, (kind, text) in enumerate(tokens):
        after = tokens[i + 1][1] if i + 1 < len(tokens) else ""
        before = tokens[i - 1][1] if i else ""
        in_labels = bool(open_brackets) and open_brackets[-1][1]
        if text in ("(", "{"):
            open_brackets.append((text, text == "{" or before in _GROUPINGS))
        elif text in _PAIRS:
            if not open_brackets or open_brackets.pop()[0] != _PAIRS[text]:
                raise SyntaxProblemError(f"{text} closes nothing in {expression}")
        elif kind == "range" and not (before == "}" or before in metrics):
            raise SyntaxProblemError(f"{text} is the range of nothing in {expression}")
        elif kind == "name" and in_labels:
            labels.add(text)
        elif kind == "name" and text not in _GROUPINGS | _SET_OPERATORS:
            if after == "(" or after in _GROUPINGS:
                if text not in _FUNCTIONS:
                    raise SyntaxProblemError(f"{text} is no function, in {expression}")
            else:
                metrics.add(text)
    if open_brackets:
        raise SyntaxProblemError(f"a bracket is open at the end of {expression}")
    if not tokens or tokens[-1][0] == "operator":
        raise SyntaxProblemError(f"something is missing at the end of {expression!r}")
    return Named(metrics, labels)


def _tokens(expression: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise SyntaxProblemError(f"{expression[at:]!r} is not understood in {expression}")
        at = match.end()
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[0]))
    return found
