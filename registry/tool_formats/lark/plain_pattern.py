"""Regular expressions converted for the grammar library within a schema."""

from __future__ import annotations

import re

_GROUP_NAME = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(-[a-zA-Z]+)?([:)])")
_LOOKS = ("(?=", "(?!", "(?<=", "(?<!", "(?>", "(?(", "(?#", "(?P=", "(?R")
_EDGES = frozenset("bBAZzG")
_KNOWN_FLAGS = frozenset("ismuU")
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
# Hexadecimal, because code that searches a pattern for escapes would join a plain backslash with
# the letter after it.
_BACKSLASH = r"\x5c"


class NotKeptError(ValueError):
    """Pattern or grammar that cannot be enforced; the message says why."""


class NoPatternError(ValueError):
    """Text that is not a valid regular expression; the message says why."""


def plain_pattern(text: str, flags: str = "") -> str:
    """Return the expression for a whole text, without anchors.

    Raises:
        NotKeptError: it has lookaround, references back or anchors in the middle.
        NoPatternError: a bracket does not close.
    """
    if unknown := sorted(set(flags) - _KNOWN_FLAGS):
        raise NotKeptError(f"the flag {unknown[0]!r} of a regular expression is not known")
    inner = text.removeprefix("^")
    if inner.endswith("$") and not _is_escaped(inner, len(inner) - 1):
        inner = inner[:-1]
    plain = _Plain(inner).read()
    kept = "".join(flag for flag in "is" if flag in flags)
    return f"(?{kept}:{plain})"


def literal_pattern(text: str, *, ignore_case: bool = False) -> str:
    """Return the expression that matches a text literally."""
    pattern = "".join(map(_literal, text))
    return f"(?i:{pattern})" if ignore_case and text else pattern


def _literal(character: str) -> str:
    if character == "\\":
        return _BACKSLASH
    if character in ".^$*+?()[]{}|/-&~#":
        return "/" if character == "/" else "\\" + character
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return character


def _is_escaped(text: str, at: int) -> bool:
    num_backslashes = len(text[:at]) - len(text[:at].rstrip("\\"))
    return num_backslashes % 2 == 1


class _Plain:
    """Converter of an expression, piece by piece."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._written: list[str] = []
        self._depth = 0

    def read(self) -> str:
        while self._at < len(self._text):
            self._step()
        if self._depth:
            raise NoPatternError("a bracket of a regular expression does not close")
        return "".join(self._written)

    def _step(self) -> None:
        character = self._text[self._at]
        match character:
            case "\\":
                self._write(*self._escape())
            case "[":
                self._class()
            case "(":
                self._open()
            case ")":
                self._depth -= 1
                if self._depth < 0:
                    raise NoPatternError("a bracket of a regular expression closes nothing")
                self._write(character, 1)
            case "^" | "$":
                raise NotKeptError(f"{character} stands within a regular expression")
            case _:
                self._write(_control(character), 1)

    def _write(self, text: str, size: int) -> None:
        self._written.append(text)
        self._at += size

    def _escape(self) -> tuple[str, int]:
        mark = self._text[self._at + 1 : self._at + 2]
        if not mark:
            raise NoPatternError("a regular expression ends in a backslash")
        if mark in _EDGES or mark.isdigit():
            raise NotKeptError(f"\\{mark} stands within a regular expression")
        if mark == "\\":
            return _BACKSLASH, 2
        if mark == "/":
            return "/", 2
        if mark.isalnum() or mark == "_":
            return "\\" + mark, 2
        return _literal(mark), 2

    def _open(self) -> None:
        rest = self._text[self._at :]
        self._depth += 1
        if not rest.startswith("(?"):
            self._write("(?:", 1)
            return
        if rest.startswith(_LOOKS):
            raise NotKeptError(
                "a regular expression looks around (look-ahead, look-behind) or refers back"
            )
        if named := _GROUP_NAME.match(rest):
            self._write("(?:", named.end())
            return
        flags = _FLAGS.match(rest)
        if flags is None or set(flags[1]) - _KNOWN_FLAGS or flags[2]:
            raise NotKeptError(f"{rest[:8]!r} stands within a regular expression")
        if flags[3] == ")":
            # These flags count to the end of their group.
            self._depth -= 1
            if self._depth or self._written:
                raise NotKeptError("flags stand within a regular expression")
        self._write(flags.group(), flags.end())

    def _class(self) -> None:
        """Convert a bracket class; inner brackets and anchors get a backslash."""
        text, at = self._text, self._at + 1
        written = ["["]
        if text[at : at + 1] == "^":
            written.append("^")
            at += 1
        if text[at : at + 1] == "]":
            written.append("\\]")
            at += 1
        while at < len(text) and text[at] != "]":
            posix = _POSIX_CLASS.match(text, at)
            if posix:
                written.append(posix.group())
                at = posix.end()
            elif text[at] == "\\":
                written.append(self._class_escape(text[at + 1 : at + 2]))
                at += 2
            else:
                written.append(_in_class(text[at]))
                at += 1
        if at >= len(text):
            raise NoPatternError("a class of a regular expression does not close")
        self._write("".join(written) + "]", at + 1 - self._at)

    def _class_escape(self, mark: str) -> str:
        if mark == "b":
            return "\\x08"
        if mark == "\\":
            return _BACKSLASH
        return "\\" + mark if mark.isalnum() else _literal(mark)


def _in_class(character: str) -> str:
    return "\\" + character if character in "[^$&~" else _control(character)


def _control(character: str) -> str:
    return f"\\x{ord(character):02x}" if character < " " else character
