"""Arguments that are plain text up to a tag, as patterns of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from millrace.registry.tool_formats.argument_types import TEXT, kinds_on
from millrace.registry.tool_formats.flat_schema import Walk, listed, resolved

# Told of a keyword, and why it is not followed.
Note = Callable[[str, str], None]

_ANY = r"(.|\n)"
_YEAR, _MONTH, _DAY = "[0-9]{4}", "(0[1-9]|1[0-2])", "(0[1-9]|[12][0-9]|3[01])"
_DATE = f"{_YEAR}-{_MONTH}-{_DAY}"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?{_ZONE}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
}
_PARTS = ("allOf", "anyOf", "oneOf")
_ABOUT_EACH_CHARACTER = frozenset({"enum", "const", "minLength", "pattern", "format"})
# Anchors and looks that a pattern has within it; those at its ends are understood.
_LOOKS = re.compile(r"\\[bBAZ]|\(\?[=!<]|(?<!\\)(?<!\[)[\^$]")


def text_pattern(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    closing_tag: str,
    note: Note,
) -> str:
    """The texts that fit a schema, as a pattern that ends before ``closing_tag``. What a schema
    admits besides texts is left out.

    Keywords that cannot be followed are passed over, unless ``note`` raises: it is told of each,
    and why.
    """
    patterns = [*_patterns(schema, Walk(root), note, 0), _without(closing_tag)]
    return " & ".join(patterns)


def fits_without_quotes(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a text in quotes that fits a schema fits it without them, as it is read where it may
    be null too."""
    walk = Walk(root)

    def fits(schema: Any, depth: int) -> bool:
        schema = resolved(schema, root)
        if not walk.enters(schema, depth) or not _ABOUT_EACH_CHARACTER.isdisjoint(schema):
            return False
        parts = [part for key in _PARTS for part in listed(schema, key)]
        return all(fits(part, depth + 1) for part in parts)

    return fits(schema, 0)


def _patterns(schema: Any, walk: Walk, note: Note, depth: int) -> Iterator[str]:
    """All of which a text must match."""
    schema = resolved(schema, walk.root)
    if not walk.enters(schema, depth):
        yield f"/{_ANY}*/"
        return
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        yield "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")"
    yield _of_length(schema)
    if isinstance(schema.get("format"), str) and (form := _format(schema["format"], note)):
        yield f"/{form}/"
    if isinstance(schema.get("pattern"), str) and (found := _searched(schema["pattern"], note)):
        yield f"/{found}/"
    for part in listed(schema, "allOf"):
        yield from _patterns(part, walk, note, depth + 1)
    for key in ("anyOf", "oneOf"):
        if branches := _texts_of(listed(schema, key), walk, depth):
            told = (" & ".join(_patterns(one, walk, note, depth + 1)) for one in branches)
            yield "(" + " | ".join(f"({one})" for one in told) + ")"


def _texts_of(branches: list[Any], walk: Walk, depth: int) -> list[Any]:
    """Those of some alternatives that admit texts."""
    kinds = [(one, kinds_on(walk, one, depth + 1)) for one in branches]
    return [one for one, told in kinds if told is None or told >= TEXT]


def _of_length(schema: Mapping[str, Any]) -> str:
    least, most = _number(schema, "minLength"), _number(schema, "maxLength")
    if least is None and most is None:
        return f"/{_ANY}*/"
    return f"/{_ANY}{{{least or 0},{'' if most is None else most}}}/"


def _number(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _format(name: str, note: Note) -> str:
    if name not in _FORMATS and name != "unknown":
        note("format", f"{name!r:.80} is not known between tags; {', '.join(_FORMATS)} are")
    return _FORMATS.get(name, "")


def _searched(pattern: str, note: Note) -> str:
    """The pattern of the texts in which a schema's pattern is found."""
    inner = pattern.removeprefix("^")
    begins = inner != pattern
    ends = inner.endswith("$") and not inner.endswith("\\$")
    inner = inner[:-1] if ends else inner
    if _LOOKS.search(inner) or ((begins or ends) and _has_open_choice(inner)):
        note("pattern", f"{pattern!r:.80} has a boundary within it")
        return ""
    inner = re.sub(r"(?<!\\)/", r"\\/", inner).replace("\n", r"\n")
    return f"{'' if begins else _ANY + '*'}({inner}){'' if ends else _ANY + '*'}"


def _has_open_choice(pattern: str) -> bool:
    """Whether an anchor beside the pattern would belong to one of its alternatives only."""
    depth = 0
    for mark in re.findall(r"\\.|\[\^?\]?[^\]]*\]|[()|]", pattern):
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and not depth:
            return True
    return False


def _without(tag: str) -> str:
    inner = re.escape(tag).replace("/", r"\/")
    return f"~/{_ANY}*{inner}{_ANY}*/"
