"""Patterns of schemas, which are ECMA's, for the library of grammars, which takes Rust's."""

from __future__ import annotations

import re

_GROUP = re.compile(r"\((?:\?(?::|P?<[^=!>][^>]*>|[imsUux-]+[:)]))?")
_LETTERS_ESCAPED = frozenset("dDwWsSnrtfvaxuUpPAz")
_LETTERS_ESCAPED_IN_CLASS = _LETTERS_ESCAPED - frozenset("Az")
_ENDS = frozenset(")|$")


def followed_pattern(pattern: str) -> str | None:
    """The pattern as a grammar can follow it; None if it cannot.

    Looks ahead and behind, references to groups, and boundaries within the pattern cannot be
    followed, nor can one that ends within an escape, which the library would leave out. Another
    pattern that is none at all is passed on: the library says what is wrong with it.
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
    """Whether the last backslash of the pattern escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _is_known_escape(escape: str, letters: frozenset[str]) -> bool:
    character = escape[1]
    if character.isascii() and not character.isalnum():
        return character not in "<>"
    return character in letters


def _class(pattern: str, begin: int) -> tuple[int, str | None]:
    """Where the class of characters ends that begins there, and how it is written; None if it
    cannot be followed. A bracket and the marks that the library takes for operations on sets are
    characters in ECMA's classes."""
    made = ["["]
    at = begin + 1
    if pattern.startswith("^", at):
        made.append("^")
        at += 1
    if pattern.startswith("]", at):  # none, or all
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
