"""Whether calls that no grammar held fit the schemas of their strict tools.

Schemas and arguments are a stranger's, so the check takes a bounded number of steps, matches no
regular expression and fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
from referencing import Registry

from millrace.schemas.notices import Notice, NoticeCode, notice
from millrace.schemas.tools import ToolCall, ToolDefinition

_MAX_STEPS = 3_000
_UNCHECKED = frozenset(
    {"pattern", "patternProperties", "format", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef"}
)
# Which properties are additional depends on regular expressions.
_BESIDE_PATTERNS = "patternProperties"

_Check = Callable[[Any, Any, Any, Any], Iterable[jsonschema.ValidationError] | None]


class _TooLargeError(Exception):
    """The check takes too many steps."""


def violations(calls: Iterable[ToolCall], tools: Iterable[ToolDefinition]) -> Iterator[Notice]:
    """One notice for each call of a strict tool whose arguments do not fit the tool's schema. A
    schema that is invalid or too large to check is not checked."""
    strict = {tool.name: tool for tool in tools if tool.strict}
    for call in calls:
        tool = strict.get(call.name)
        fault = None if tool is None else _fault(call.arguments, tool.parameters)
        if fault is not None:
            yield notice(NoticeCode.STRICT_VIOLATED, "tools", f"{call.name}: {fault}")


def _fault(text: str, schema: Mapping[str, Any] | None) -> str | None:
    try:
        arguments = json.loads(text or "{}")
        if not isinstance(arguments, dict):
            return "the arguments are no JSON object"
    except (ValueError, RecursionError):
        return "the arguments are no JSON"
    try:
        return _first_error(arguments, schema or {"additionalProperties": False})
    except Exception:  # noqa: BLE001 (an invalid schema can fail anywhere)
        return None


def _first_error(arguments: dict[str, Any], schema: Mapping[str, Any]) -> str | None:
    left = _MAX_STEPS

    def counted(check: _Check) -> _Check:
        def run(
            validator: Any, value: Any, instance: Any, schema: Any
        ) -> Iterable[jsonschema.ValidationError] | None:
            nonlocal left
            left -= 1 + (len(value) if isinstance(value, list | dict) else 0)
            if check is unique:
                left -= len(instance) ** 2 if isinstance(instance, list) else 0
            if left < 0:
                raise _TooLargeError
            if check is additional and _BESIDE_PATTERNS in schema:
                return ()
            return check(validator, value, instance, schema)

        return run

    known = jsonschema.Draft202012Validator.VALIDATORS
    unique, additional = known["uniqueItems"], known["additionalProperties"]
    checks: dict[str, Any] = {
        name: counted(check) for name, check in known.items() if name not in _UNCHECKED
    }
    metaschema = jsonschema.Draft202012Validator.META_SCHEMA
    checker = jsonschema.validators.create(metaschema, checks)
    error = next(checker(schema, registry=Registry()).iter_errors(arguments), None)
    return None if error is None else f"{error.json_path}: {error.message}"
