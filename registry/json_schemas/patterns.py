"""Regular expressions of schemas (ECMA) converted for the grammar library (Rust)."""

from __future__ import annotations

import re

_GROUP = re.compile(r"\((?:\?(?::|P?<[^=!>][^>]*>|[imsUux-]+[:)]))?")
_LETTERS_ESCAPED = frozenset("dDwWsSnrtfvaxuUpPAz")
_LETTERS_ESCAPED_IN_CLASS = _LETTERS_ESCAPED - frozenset("Az")
_ENDS = frozenset(")|$")


def followed_pattern(pattern: str) -> str | None:
    """Return the pattern in the form for grammars; None if it is not supported.

    Lookaround, references to groups, and boundaries inside the pattern are not supported. Nor is a
    pattern that ends within an escape, which the library would ignore. Another invalid pattern is
    passed on: the library reports what is wrong with it.
    """
    if ends_within_escape(pattern):
        return None
    made: list[str] = []
    at, may_begin = 0, True
    while at < len(pattern):
        character = pattern[at]
        taken = character
        if character == "\\":
            taken = pattern[at : at + 2]
            if not _is_known_escape(taken, _LETTERS_ESCAPED):
                return None
            may_begin = False
        elif character == "[":
            end, found = _class(pattern, at)
            if found is None:
                return None
            made.append(found)
            at, may_begin = end, False
            continue
        elif character == "(":
            group = _GROUP.match(pattern, at)
            assert group is not None
            taken = group.group()
            if pattern.startswith("?", at + len(taken)):
                return None
            may_begin = True
        elif character == "^":
            if not may_begin:
                return None
        elif character == "$":
            if at + 1 < len(pattern) and pattern[at + 1] not in _ENDS:
                return None
        else:
            may_begin = character == "|"
        made.append(taken)
        at += len(taken)
    return "".join(made)


def ends_within_escape(pattern: str) -> bool:
    """Return whether the last backslash of the pattern escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _is_known_escape(escape: str, letters: frozenset[str]) -> bool:
    character = escape[1]
    if character.isascii() and not character.isalnum():
        return character not in "<>"
    return character in letters


def _class(pattern: str, begin: int) -> tuple[int, str | None]:
    """Return the end of the character class that begins at ``begin``, and its converted form; None
    if it is not supported.

    A bracket and the library's set operators are plain characters in ECMA's classes.
    """
    made = ["["]
    at = begin + 1
    if pattern.startswith("^", at):
        made.append("^")
        at += 1
    if pattern.startswith("]", at):  # matches nothing, or anything
        return at, None
    while at < len(pattern) and pattern[at] != "]":
        character = pattern[at]
        if character == "\\":
            escape = pattern[at : at + 2]
            if not _is_known_escape(escape, _LETTERS_ESCAPED_IN_CLASS):
                return at, None
            made.append(escape)
            at += 2
            continue
        made.append(f"\\{character}" if character in "[&~" else character)
        at += 1
    return min(at + 1, len(pattern)), "".join([*made, pattern[at : at + 1]])
