"""Rules of a grammar for arguments that are written one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millrace.registry.json_schemas.keeping import Unkept
from millrace.registry.tool_formats.argument_types import TEXT, kinds_of
from millrace.registry.tool_formats.dropped import Dropped
from millrace.registry.tool_formats.flat_schema import FlatSchema, flat_schemas, listed, resolved
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
from millrace.registry.tool_formats.text_rules import fits_without_quotes, text_pattern
from millrace.schemas.errors import ParameterError
from millrace.schemas.tools import ToolDefinition

_KEYWORD = re.compile(r"\w[\w-]*")
_TAG_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
_NULLABLE = TEXT | {"null"}


class Tags(NamedTuple):
    """Patterns, of which ``{}`` is a name, before a call's arguments and before each of them, with
    ``gap`` between them and behind each argument, in the language of grammars. What ends an
    argument, and all; texts end before ``closing``."""

    before: tuple[str, ...]
    opening: tuple[str, ...]
    ending: str
    after: str
    closing: str
    gap: str


def literal(text: str) -> str:
    """A text in the language of grammars."""
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
    """The rule ``one_<number>`` of a call with arguments between tags, in the order of the schema.
    Raises ParameterError for a parameter whose name or texts tags cannot hold."""
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
    """The rule of a value and the tag that ends it."""
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
    """The rule ``one_<number>`` of a call with keyword arguments. Raises ParameterError for a
    parameter whose name is none of a keyword."""
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
    """Without properties that nothing fits."""
    properties = {}
    for name, schema in form.properties.items():
        if schema is False and name in form.required:
            raise ParameterError("tools", f"Nothing fits the parameter {name:.80} of {tool.name}.")
        if schema is not False:
            properties[name] = schema if isinstance(schema, dict) else {}
    return form._replace(properties=properties)


def _keywords(prefix: str, form: FlatSchema) -> str:
    """All arguments of a call."""
    if not form.properties:
        return ""
    return f"first_{prefix}_0" if form.required else f"(first_{prefix}_0)?"


def _keyword_rules(prefix: str, form: FlatSchema) -> Iterator[str]:
    """``first_<prefix>_<i>``: the arguments from the i-th on, of which one must be there;
    ``more_<prefix>_<i>``: those that come behind another one."""
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
    """Those that a value may be and that JSON writes in another way."""
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
