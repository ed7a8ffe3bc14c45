"""Grammar rules for arguments that are written one by one: JSON, or plain text up to a tag."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millrace.registry.json_schemas.keeping import Unkept
from millrace.registry.tool_formats.argument_types import (
    TEXT,
    FlatSchema,
    Walk,
    flat_schemas,
    kinds_of,
    kinds_on,
    listed,
    resolved,
)
from millrace.registry.tool_formats.dropped import Dropped
from millrace.registry.tool_formats.tags import (
    FUNCTION_END,
    FUNCTION_TAG,
    KEY_END,
    KEY_TAG,
    PARAMETER_END,
    PARAMETER_TAG,
    VALUE_END,
    VALUE_TAG,
)
from millrace.schemas.errors import ParameterError
from millrace.schemas.tools import ToolDefinition

# Called with a keyword and the reason why it is not enforced.
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
# Anchors and lookaround within a pattern; anchors at its ends are supported.
_LOOKS = re.compile(r"\\[bBAZ]|\(\?[=!<]|(?<!\\)(?<!\[)[\^$]")


def text_pattern(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    closing_tag: str,
    note: Note,
) -> str:
    """Return a pattern of the texts that fit a schema, which ends before ``closing_tag``.

    Values of a schema other than texts are left out. ``note`` is called with each keyword that is
    not supported, and why; unless it raises, the keyword is ignored.
    """
    patterns = [*_patterns(schema, Walk(root), note, 0), _without(closing_tag)]
    return " & ".join(patterns)


def fits_without_quotes(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether quoted texts that fit a schema also fit it without quotes, as they are read
    where null is allowed.
    """
    walk = Walk(root)

    def fits(schema: Any, depth: int) -> bool:
        schema = resolved(schema, root)
        if not walk.enters(schema, depth) or not _ABOUT_EACH_CHARACTER.isdisjoint(schema):
            return False
        parts = [part for key in _PARTS for part in listed(schema, key)]
        return all(fits(part, depth + 1) for part in parts)

    return fits(schema, 0)


def _patterns(schema: Any, walk: Walk, note: Note, depth: int) -> Iterator[str]:
    """Yield patterns, all of which a text must match."""
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
    """Return the alternatives that admit texts."""
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
        note("format", f"{name!r:.80} is not supported between tags; use {', '.join(_FORMATS)}")
    return _FORMATS.get(name, "")


def _searched(pattern: str, note: Note) -> str:
    """Return the pattern of the texts in which a schema's pattern is found."""
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
    """Return whether an anchor next to the pattern would belong to only one of its alternatives."""
    depth = 0
    for mark in re.findall(r"\\.|\[\^?\]?[^\]]*\]|[()|]", pattern):
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and not depth:
            return True
    return False


def _without(tag: str) -> str:
    inner = re.escape(tag).replace("/", r"\/")
    return f"~/{_ANY}*{inner}{_ANY}*/"


_KEYWORD = re.compile(r"\w[\w-]*")
_TAG_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
_NULLABLE = TEXT | {"null"}


class Tags(NamedTuple):
    """Tags around a call's arguments.

    ``before`` and ``opening`` are patterns in which ``{}`` is a name: the tags before all arguments
    and before each argument, with ``gap`` between them and after each argument. ``ending`` ends an
    argument, ``after`` the call. Texts end before ``closing``.
    """

    before: tuple[str, ...]
    opening: tuple[str, ...]
    ending: str
    after: str
    closing: str
    gap: str


def literal(text: str) -> str:
    """Return a text as a literal of the grammar language."""
    return json.dumps(text, ensure_ascii=False)


QWEN_TAGS = Tags(
    before=(FUNCTION_TAG + "{}>", ""),
    opening=(PARAMETER_TAG + "{}>", ""),
    ending="\n" + PARAMETER_END,
    after=FUNCTION_END,
    closing=PARAMETER_END,
    gap=literal("\n"),
)
# GLM 4.5 and 4.6 break lines, 4.7 does not.
GLM_TAGS = Tags(
    before=("{}", ""),
    opening=(KEY_TAG + "{}" + KEY_END, VALUE_TAG),
    ending=VALUE_END,
    after="",
    closing=VALUE_END,
    gap=literal("\n") + "?",
)


def rules_in_tags(
    tags: Tags,
    tool: ToolDefinition,
    number: int,
    schema: Mapping[str, Any],
    settings: Mapping[str, Any],
    dropped: Dropped,
) -> Iterator[str]:
    """Yield the rule ``one_<number>`` of a call with arguments between tags, in the order of the
    schema.

    Raises:
        ParameterError: tags cannot hold a parameter's name or texts.
    """
    calls = []
    for i, form in enumerate(_possible(tool, form) for form in flat_schemas(schema)):
        arguments = []
        for j, (name, one) in enumerate(form.properties.items()):
            if not _TAG_NAME.fullmatch(name):
                raise _bad_name(tool, name, "no tags and line breaks")
            mark = f"{number}_{i}_{j}"
            arguments.append(f"value_{mark}" + ("" if name in form.required else "?"))
            opening = _joined(tags.opening, name, tags.gap)
            yield f"value_{mark}: {opening} ended_{mark} {tags.gap}"
            path = f"properties.{name}"
            note = partial(_note_text, tool, path, dropped)
            yield from _value_in_tags(tags, mark, one, schema, settings, note)
        after = literal(tags.after) if tags.after else ""
        before = _joined(tags.before, tool.name, tags.gap)
        calls.append(f"{before} {' '.join(arguments)} {after}")
    yield f"one_{number}: " + " | ".join(calls)


def _joined(patterns: tuple[str, ...], name: str, gap: str) -> str:
    texts = (pattern.format(name) for pattern in patterns)
    return f" {gap} ".join(literal(text) if text else "" for text in texts)


def _value_in_tags(
    tags: Tags,
    mark: str,
    one: Mapping[str, Any],
    root: Mapping[str, Any],
    settings: Mapping[str, Any],
    note: Callable[[str, str], None],
) -> Iterator[str]:
    """Yield the rule of a value and the tag that ends it."""
    kinds = kinds_of(one, root)
    ending = literal(tags.ending)
    is_text = kinds == TEXT or (kinds == _NULLABLE and fits_without_quotes(one, root))
    if not is_text:
        yield f"ended_{mark}: json_{mark} {ending}"
        yield f"json_{mark}: %json {json.dumps({**one, **settings})}"
        return
    pattern = text_pattern(one, root, tags.closing, note)
    if kinds == TEXT:
        yield f"ended_{mark}[lazy]: TEXT_{mark} {ending}"
    else:
        yield f"ended_{mark}: text_{mark} | {literal('null' + tags.ending)}"
        yield f"text_{mark}[lazy]: TEXT_{mark} {ending}"
    yield f"TEXT_{mark}: {pattern}"


def _note_text(tool: ToolDefinition, path: str, dropped: Dropped, keyword: str, why: str) -> None:
    dropped.add(tool, Unkept(path, keyword, why))


def rules_in_python(
    tool: ToolDefinition, number: int, schema: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the rule ``one_<number>`` of a call with keyword arguments.

    Raises:
        ParameterError: a parameter's name is not valid as a keyword.
    """
    forms = [_possible(tool, form) for form in flat_schemas(schema)]
    calls = []
    for i, form in enumerate(forms):
        prefix = f"{number}_{i}"
        calls.append(
            f"{literal(tool.name)} {literal('(')} {_keywords(prefix, form)} {literal(')')}"
        )
        for j, (name, one) in enumerate(form.properties.items()):
            if not _KEYWORD.fullmatch(name):
                raise _bad_name(tool, name, "nothing but letters, digits, _ and -")
            constants = "".join(f" | {word}" for word in _python_constants(one, schema))
            yield f"value_{prefix}_{j}: {literal(f'{name}=')} (json_{prefix}_{j}{constants})"
            yield f"json_{prefix}_{j}: %json {json.dumps({**one, **settings})}"
        yield from _keyword_rules(prefix, form)
    yield f"one_{number}: " + " | ".join(calls)


def _possible(tool: ToolDefinition, form: FlatSchema) -> FlatSchema:
    """Return the form without properties that no value fits."""
    properties = {}
    for name, schema in form.properties.items():
        if schema is False and name in form.required:
            raise ParameterError(
                "tools", f"No value fits the parameter {name:.80} of the tool {tool.name}."
            )
        if schema is not False:
            properties[name] = schema if isinstance(schema, dict) else {}
    return form._replace(properties=properties)


def _keywords(prefix: str, form: FlatSchema) -> str:
    """Return the expression for all arguments of a call."""
    if not form.properties:
        return ""
    return f"first_{prefix}_0" if form.required else f"(first_{prefix}_0)?"


def _keyword_rules(prefix: str, form: FlatSchema) -> Iterator[str]:
    """Yield the rules for lists of arguments.

    ``first_<prefix>_<i>``: the arguments from the i-th on, at least one of them.
    ``more_<prefix>_<i>``: arguments that follow another one.
    """
    names = list(form.properties)
    for i, name in enumerate(names):
        value = f"value_{prefix}_{i}"
        another = f"{literal(', ')} {value}"
        is_last = i + 1 == len(names)
        following = "" if is_last else f" more_{prefix}_{i + 1}"
        if name in form.required:
            yield f"first_{prefix}_{i}: {value}{following}"
            yield f"more_{prefix}_{i}: {another}{following}"
        else:
            later = "" if is_last else f" | first_{prefix}_{i + 1}"
            yield f"first_{prefix}_{i}: {value}{following}{later}"
            yield f"more_{prefix}_{i}: ({another})?{following}"


def _python_constants(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Sequence[str]:
    """Return Python's constants that the value may be and that JSON spells differently."""
    whole = resolved(schema, root)
    if not isinstance(whole, dict) or not {"enum", "const"}.isdisjoint(whole):
        return ()
    kind = whole.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    words = []
    if "boolean" in kinds:
        words += [literal("True"), literal("False")]
    if "null" in kinds or {"type": "null"} in listed(whole, "anyOf"):
        words.append(literal("None"))
    return words


def _bad_name(tool: ToolDefinition, name: str, bounds: str) -> ParameterError:
    return ParameterError(
        "tools",
        f"The tool {tool.name} has a parameter {name!r:.80}: where this model writes arguments, "
        f"their names have {bounds}.",
    )
