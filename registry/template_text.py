"""Text that separates the characters of a chat template from those of content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

Spans = tuple[tuple[int, int], ...]

# One conversion of a printf-style format, such as ``%s`` or ``%(name)-8.3f``.
_CONVERSION = re.compile(
    r"%(?:\((?P<name>[^)]*)\))?[-#0 +]*\d*(?:\.\d+)?[hlL]?(?P<kind>.)", re.DOTALL
)


class TemplateText(str):
    """String that knows which of its characters the server wrote.

    ``spans`` are the (start, end) of those characters, in order and not adjacent: literals of the
    chat template, and markup that the server adds itself. All other characters are content. The
    methods below keep the spans of the texts that they cut and join. Every other string operation
    returns a plain ``str``, which is content. So an unknown operation cannot turn content into
    markup.
    """

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: str = "", spans: Spans = ()) -> TemplateText:
        made = str.__new__(cls, text)
        made.spans = spans
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        if not isinstance(other, str) or hasattr(other, "__html__"):
            return NotImplemented
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        text = str.__mul__(self, times)
        if not self.spans:
            return text
        if self.spans == ((0, len(self)),):
            return literal(text)
        return joined([self] * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        if not self.spans or "*" in self:
            return text
        formatted = joined(_formatted(self, values))
        # If the parts do not add up to the whole, a conversion is unknown here.
        return formatted if formatted == text else text

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            start, _, step = key.indices(len(self))
            if step != 1:
                return text
        else:
            start = range(len(self))[key]
        return self._part(text, start)

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self))) if self.spans else str.__iter__(self)

    def _part(self, text: str, start: int) -> str:
        """Return ``text``, which begins at ``start``, with its spans."""
        if not self.spans:
            return text
        end = start + len(text)
        return TemplateText(
            text,
            tuple(
                (max(first, start) - start, min(last, end) - start)
                for first, last in self.spans
                if first < end and last > start
            ),
        )

    def _parts(self, texts: Iterable[str], gap: int) -> list[str]:
        """Return parts of this text that have ``gap`` characters between them."""
        parts, at = [], 0
        for text in texts:
            parts.append(self._part(text, at))
            at += len(text) + gap
        return parts

    def _words(self, texts: Iterable[str]) -> list[str]:
        """Return parts of this text that have blanks between them."""
        parts, at = [], 0
        for text in texts:
            at = str.index(self, text, at)
            parts.append(self._part(text, at))
            at += len(text)
        return parts

    def _of_same_length(self, text: str) -> str:
        return TemplateText(text, self.spans) if len(text) == len(self) else text

    def strip(self, chars: str | None = None) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._part(str.strip(self, chars), start)

    def lstrip(self, chars: str | None = None) -> str:
        text = str.lstrip(self, chars)
        return self._part(text, len(self) - len(text))

    def rstrip(self, chars: str | None = None) -> str:
        return self._part(str.rstrip(self, chars), 0)

    def removeprefix(self, prefix: str, /) -> str:
        text = str.removeprefix(self, prefix)
        return self._part(text, len(self) - len(text))

    def removesuffix(self, suffix: str, /) -> str:
        return self._part(str.removesuffix(self, suffix), 0)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        texts = str.split(self, sep, maxsplit)
        return self._words(texts) if sep is None else self._parts(texts, len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        texts = str.rsplit(self, sep, maxsplit)
        return self._words(texts) if sep is None else self._parts(texts, len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._parts(str.splitlines(self, keepends=True), 0)
        if keepends:
            return lines
        bare = str.splitlines(self)
        return [line[: len(text)] for line, text in zip(lines, bare, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._parts(str.partition(self, sep), 0)
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._parts(str.rpartition(self, sep), 0)
        return before, found, after

    def join(self, texts: Iterable[str], /) -> TemplateText:
        pieces: list[str] = []
        for text in texts:
            pieces += (self, text)
        return joined(pieces[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        told = new if isinstance(new, TemplateText) else TemplateText(new)
        if not old or not (self.spans or told.spans):
            return str.replace(self, old, new, count)
        return told.join(self.split(old, count))

    def upper(self) -> str:
        return self._of_same_length(str.upper(self))

    def lower(self) -> str:
        return self._of_same_length(str.lower(self))

    def title(self) -> str:
        return self._of_same_length(str.title(self))

    def capitalize(self) -> str:
        return self._of_same_length(str.capitalize(self))


def literal(text: str) -> TemplateText:
    """Return ``text`` marked as written by the server."""
    return TemplateText(text, ((0, len(text)),) if text else ())


def filled(form: str, **texts: str) -> TemplateText:
    """Return ``form``, which the server wrote, with ``texts`` instead of their names in braces."""
    pieces = re.split(r"\{(\w+)\}", form)
    return joined(
        texts[piece] if index % 2 else literal(piece) for index, piece in enumerate(pieces)
    )


def joined(pieces: Iterable[str]) -> TemplateText:
    """Return the pieces as one text, with the spans of each."""
    pieces = list(pieces)
    spans: list[tuple[int, int]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, TemplateText):
            if not at:
                # Templates that build a conversation in one text add to it once for each turn.
                spans.extend(piece.spans)
                at = len(piece)
                continue
            for first, last in piece.spans:
                if spans and spans[-1][1] == at + first:
                    spans[-1] = (spans[-1][0], at + last)
                else:
                    spans.append((at + first, at + last))
        at += len(piece)
    return TemplateText("".join(pieces), tuple(spans))


def _formatted(form: TemplateText, values: Any) -> Iterator[str]:
    """Yield the parts of ``form % values``."""
    left = iter(values if isinstance(values, tuple) else (values,))
    at = 0
    for found in _CONVERSION.finditer(form):
        yield form[at : found.start()]
        at = found.end()
        if found["kind"] == "%":
            yield form[at - 1 : at]
            continue
        is_named = found["name"] is not None and isinstance(values, Mapping)
        value = values[found["name"]] if is_named else next(left, "")
        is_bare = found[0] == "%s" or (is_named and found[0] == f"%({found['name']})s")
        if is_bare and isinstance(value, str):
            yield value
        else:
            yield str.__mod__(found[0], values if is_named else (value,))
    yield form[at:]
