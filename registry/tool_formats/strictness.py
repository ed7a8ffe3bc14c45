"""Check of unconstrained calls against the schemas of their strict tools.

Schemas and arguments are untrusted. So the check takes a bounded number of steps, matches no
regular expression and fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
import msgspec
from referencing import Registry

from millrace.schemas.notices import Notice, NoticeCode, notice
from millrace.schemas.tools import ToolCall, ToolDefinition

_MAX_STEPS = 3_000  # per answer
_MAX_SCHEMA_BYTES = 262_144  # an error may quote much of the schema
_UNCHECKED = frozenset(
    {"pattern", "patternProperties", "format", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef"}
)
# Keywords that check each entry of the instance.
_OF_EACH_ENTRY = frozenset(
    {"additionalProperties", "contains", "items", "prefixItems", "propertyNames"}
)
# Regular expressions decide which properties are additional.
_BESIDE_PATTERNS = "patternProperties"

_Check = Callable[[Any, Any, Any, Any], Iterable[jsonschema.ValidationError] | None]


class _TooLargeError(Exception):
    """Check that takes too many steps."""


class _Budget:
    """Remaining steps for the checks of one answer."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def take(self, keyword: str, value: Any, instance: Any) -> None:
        """Count the steps of one keyword. Raises _TooLargeError if too few are left."""
        num_entries = len(instance) if isinstance(instance, list | dict) else 0
        self._left -= 1 + _size(value)
        if keyword in _OF_EACH_ENTRY:
            self._left -= num_entries
        elif keyword == "uniqueItems":
            self._left -= num_entries**2
        elif keyword == "$ref":
            # The library reads the whole schema for each reference to an anchor or an id.
            if value != "#" and not value.startswith("#/"):
                raise _TooLargeError
            self._left -= value.count("/")
        if self._left < 0:
            raise _TooLargeError


def violations(calls: Iterable[ToolCall], tools: Iterable[ToolDefinition]) -> Iterator[Notice]:
    """Yield a notice for each call of a strict tool whose arguments do not fit the tool's schema.

    A schema that is invalid or too large is not checked.
    """
    strict = {tool.name: tool for tool in tools if tool.strict}
    if not strict:
        return
    checker = _checker(_Budget())
    for call in calls:
        tool = strict.get(call.name)
        fault = None if tool is None else _fault(call.arguments, tool.parameters, checker)
        if fault is not None:
            yield notice(NoticeCode.STRICT_VIOLATED, "tools", f"{call.name}: {fault}")


def _fault(text: str, schema: Mapping[str, Any] | None, checker: Any) -> str | None:
    try:
        arguments = json.loads(text or "{}")
        if not isinstance(arguments, dict):
            return "the arguments are not a JSON object"
    except (ValueError, RecursionError):
        return "the arguments are not JSON"
    try:
        rules = schema or {"additionalProperties": False}
        if len(msgspec.json.encode(rules)) > _MAX_SCHEMA_BYTES:
            return None
        error = next(checker(rules, registry=Registry()).iter_errors(arguments), None)
    except Exception:  # noqa: BLE001 (an invalid schema can fail anywhere)
        return None
    return None if error is None else f"{error.json_path}: {error.message}"


def _checker(budget: _Budget) -> Any:
    """Return the library's validator class, with checks that take steps from ``budget``."""

    def counted(keyword: str, check: _Check) -> _Check:
        def run(
            validator: Any, value: Any, instance: Any, schema: Any
        ) -> Iterable[jsonschema.ValidationError] | None:
            budget.take(keyword, value, instance)
            if keyword == "additionalProperties" and _BESIDE_PATTERNS in schema:
                return ()
            return check(validator, value, instance, schema)

        return run

    checks: dict[str, Any] = {
        keyword: counted(keyword, check)
        for keyword, check in jsonschema.Draft202012Validator.VALIDATORS.items()
        if keyword not in _UNCHECKED
    }
    metaschema = jsonschema.Draft202012Validator.META_SCHEMA
    return jsonschema.validators.create(metaschema, checks)


def _size(value: Any) -> int:
    """Return the number of entries of a keyword's value, and of the lists in it."""
    if not isinstance(value, list | dict):
        return 0
    entries = value.values() if isinstance(value, dict) else value
    return len(value) + sum(len(one) for one in entries if isinstance(one, list))
