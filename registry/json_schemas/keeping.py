"""Rewriter of a schema for the grammar library; it finds the keywords that cannot be enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from millrace.registry.json_schemas.counts import MAX, MIN, OF_THE_WHOLE, counted_forms
from millrace.registry.json_schemas.exclusion import Exclusion
from millrace.registry.json_schemas.patterns import ends_within_escape, followed_pattern
from millrace.registry.json_schemas.productive import Productive, references
from millrace.registry.json_schemas.walk import TYPES, listed, number, referred, table, types_of
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS

_STEP = 1e-6
FORMATS = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uuid", "unknown"),
    }
)
# Keywords that no grammar can enforce, with the values that demand nothing.
_UNFOLLOWED: Mapping[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "dependentSchemas": ({},),
    "dependentRequired": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}, {"type": "string"}),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
# Keywords that demand nothing without one of these others.
_BESIDE: Mapping[str, tuple[str, ...]] = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_MAX_FORM_CHARACTERS = MAX_GRAMMAR_CHARACTERS // 2
_ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")  # used only by those references
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def kept_bounds(schema: dict[str, Any]) -> None:
    """Change bounds between which the only whole number is an excluded bound.

    The library admits that number: of the numbers above 2 and up to 2.5 it admits 2. So the bound
    is moved by a millionth of the range.
    """
    least, most = number(schema, "exclusiveMinimum"), number(schema, "exclusiveMaximum")
    upper = _tighter(number(schema, "maximum"), most, min)
    lower = _tighter(number(schema, "minimum"), least, max)
    if least is not None and least == lower and upper is not None and _is_beside(least, upper):
        schema["minimum"] = least + (upper - least) * _STEP
        del schema["exclusiveMinimum"]
    if most is not None and most == upper and lower is not None and _is_beside(most, lower):
        schema["maximum"] = most - (most - lower) * _STEP
        del schema["exclusiveMaximum"]


def _tighter(one: float | None, other: float | None, choose: Any) -> float | None:
    given = [bound for bound in (one, other) if bound is not None]
    return choose(given) if given else None


def _is_beside(whole: float, other: float) -> bool:
    """Return whether the first number is whole and less than 1 from the other."""
    return whole == int(whole) and 0 < abs(other - whole) < 1


class Unkept(NamedTuple):
    """Keyword that answers do not follow, and why. ``path`` is the place of its schema; empty for
    the root.
    """

    path: str
    keyword: str
    why: str

    def __str__(self) -> str:
        place = f"{self.path}.{self.keyword}" if self.path else self.keyword
        return f"{place}: {self.why}"


class UnkeptError(ValueError):
    """Schema with a keyword that cannot be enforced."""

    def __init__(self, unkept: Unkept) -> None:
        super().__init__(str(unkept))
        self.unkept = unkept


Note = Callable[[Unkept], None]


def kept_schema(schema: dict[str, Any], note: Note) -> dict[str, Any]:
    """Return the schema without the keywords that cannot be enforced.

    Keywords that the library does not know are expressed by others where possible. ``note`` is
    called with each dropped keyword and may raise.

    Raises:
        UnkeptError: nothing finite matches the schema.
        RecursionError: the schema is nested too deeply.
    """
    productive = Productive(schema)
    if not productive.has_value(schema):
        raise UnkeptError(_blamed(schema, productive))
    kept = _Keeper(_with_used(schema), productive, note).kept_root()
    if not isinstance(kept, dict):
        raise UnkeptError(Unkept("", MIN if MIN in schema else MAX, _WHY_NO_OBJECT))
    return kept


def _with_used(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without unused definitions, which must not cause a refusal."""
    definitions = {key: table(schema, key) for key in _DEFINITIONS if table(schema, key)}
    if not definitions:
        return schema
    used: set[str] = set()
    left = references({key: schema[key] for key in schema if key not in definitions})
    while left:
        used |= left
        left = set().union(*(references(referred(one, schema)) for one in left)) - used
    if any(not one.startswith("#/") for one in used):
        return schema  # the name may be that of any definition
    found = dict(schema)
    heads = {"/".join(one.split("/", 3)[:3]) for one in used}
    for key, named in definitions.items():
        found[key] = {
            name: one for name, one in named.items() if f"#/{key}/{_escaped(name)}" in heads
        }
    return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# Keywords that can leave a schema without a value, in the order of the search.
_EMPTYING = ("$ref", "not", "enum", "allOf", "anyOf", "oneOf", "items", "prefixItems")


def _blamed(schema: dict[str, Any], productive: Productive) -> Unkept:
    """Return the keyword that leaves a schema without a finite value."""
    why = "nothing finite matches it: it requires itself, or allows no values"
    properties = table(schema, "properties")
    for name in listed(schema, "required"):
        if isinstance(name, str) and not productive.has_value(properties.get(name, True)):
            return Unkept(f"properties.{name}", "required", why)
    keyword = next((key for key in _EMPTYING if key in schema), "type")
    return Unkept("", keyword, why)


def refuse(unkept: Unkept) -> None:
    """Raise UnkeptError: a ``note`` for schemas that must be enforced completely."""
    raise UnkeptError(unkept)


class _Keeper:
    def __init__(self, root: dict[str, Any], productive: Productive, note: Note) -> None:
        self._root = root
        self._productive = productive
        self._exclusion = Exclusion(root)
        self._num_characters_left = _MAX_FORM_CHARACTERS
        self._note = note

    def kept_root(self) -> Any:
        """Return the root schema without the keywords that cannot be enforced."""
        return self.kept(self._root, "")

    def kept(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        if not self._productive.has_value(schema):
            return False
        self._check_reference(schema, path)
        found = dict(schema)
        self._drop_unfollowed(found, path)
        self._keep_texts(found, path)
        kept_bounds(found)
        for key in _NAMED:
            if isinstance(found.get(key), dict):
                found[key] = self._named(key, found[key], _joined(path, key))
        for key in _SINGLE:
            if isinstance(found.get(key), dict):
                found[key] = self.kept(found[key], _joined(path, key))
        for key in _LISTS:
            if isinstance(found.get(key), list):
                parts = enumerate(found[key])
                found[key] = [self.kept(one, f"{_joined(path, key)}[{i}]") for i, one in parts]
        self._check_choice(schema, path)
        return self._counted(found, path)

    def _check_reference(self, schema: dict[str, Any], path: str) -> None:
        """Check that a reference leads somewhere, and raise UnkeptError otherwise.

        A schema with ``$id`` is left to the library, which may resolve its references.
        """
        reference = schema.get("$ref")
        if not isinstance(reference, str) or "$id" in self._root:
            return
        if reference.startswith("#/"):
            if referred(reference, self._root) is None:
                why = f"there is no {reference:.80} in the schema"
                raise UnkeptError(Unkept(path, "$ref", why))
        elif not reference.startswith("#"):
            why = f"{reference:.80} is outside this schema and is not fetched; put it into $defs"
            raise UnkeptError(Unkept(path, "$ref", why))

    def _drop_unfollowed(self, found: dict[str, Any], path: str) -> None:
        for key in _ANCHORS:
            found.pop(key, None)
        for key, needed in _BESIDE.items():
            if found.keys().isdisjoint(needed):
                found.pop(key, None)
        for key, nothing in _UNFOLLOWED.items():
            if key not in found:
                continue
            value = found.pop(key)
            if not any(value == one and type(value) is type(one) for one in nothing):
                self._note(Unkept(path, key, "grammars do not support it"))

    def _keep_texts(self, found: dict[str, Any], path: str) -> None:
        form, pattern = found.get("format"), found.get("pattern")
        if isinstance(form, str) and form not in FORMATS and "string" in types_of(found):
            del found["format"]
            known = ", ".join(sorted(FORMATS - {"unknown"}))
            self._note(Unkept(path, "format", f"{form!r:.80} is not supported; use one of {known}"))
        if isinstance(pattern, str):
            followed = followed_pattern(pattern)
            if followed is None:
                del found["pattern"]
                self._note(Unkept(path, "pattern", _why_not(pattern)))
            else:
                found["pattern"] = followed

    def _named(self, key: str, schemas: dict[str, Any], path: str) -> dict[str, Any]:
        found = {}
        for name, schema in schemas.items():
            told = name
            if key == "patternProperties":
                followed = followed_pattern(name)
                if followed is None:
                    self._note(Unkept(path, name, _why_not(name)))
                    continue
                told = followed
            found[told] = self.kept(schema, f"{path}.{name}")
        return found

    def _check_choice(self, schema: dict[str, Any], path: str) -> None:
        """Note a ``oneOf`` whose schemas do not exclude each other: the library treats it as
        anyOf.
        """
        choices = schema.get("oneOf")
        if isinstance(choices, list) and not self._exclusion.holds(choices, types_of(schema)):
            self._note(Unkept(path, "oneOf", _WHY_NOT_ONE))

    def _within_bounds(
        self, forms: list[dict[str, Any]] | None, found: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """Return the forms of an object; None if they are too long to write down."""
        if forms is None or len(forms) <= 1:
            return forms
        num_characters = len(forms) * len(json.dumps(found))
        if num_characters > self._num_characters_left:
            return None
        self._num_characters_left -= num_characters
        return forms

    def _counted(self, found: dict[str, Any], path: str) -> dict[str, Any] | bool:
        """Express the bounds on the number of properties by other keywords. Return False if no
        object has that many.
        """
        if MIN not in found and MAX not in found:
            return found
        if "object" not in types_of(found):
            return {key: value for key, value in found.items() if key not in (MIN, MAX)}
        as_object = found | {"type": "object"}
        forms = self._within_bounds(counted_forms(as_object), found)
        if forms is None:
            for key in (MIN, MAX):
                if found.pop(key, None) is not None:
                    self._note(Unkept(path, key, _WHY_NO_COUNT))
            return found
        kinds = found.get("type", sorted(TYPES))
        others = [one for one in kinds if one != "object"] if isinstance(kinds, list) else []
        if not (forms or others):
            return False
        if forms == [as_object]:
            return found
        if len(forms) == 1 and not others:
            return forms[0]
        rest = {key: value for key, value in found.items() if key not in (MIN, MAX)}
        if others:
            forms = [rest | {"type": others}, *forms]
        named = {key: found[key] for key in OF_THE_WHOLE if key in found}
        bare = [{key: one[key] for key in one if key not in named} for one in forms]
        return named | ({} if others else {"type": "object"}) | {"anyOf": bare}


_WHY_NO_OBJECT = "no object can have that many of the listed properties"
_WHY_NOT_ONE = "a value could match two of its schemas; make them exclude each other, or use anyOf"
_WHY_NO_COUNT = (
    "it needs additionalProperties false, no patternProperties and few listed properties; an "
    "unlisted name could otherwise be repeated"
)


def _why_not(pattern: str) -> str:
    if ends_within_escape(pattern):
        return f"{pattern!r:.80} ends in a lone backslash"
    return f"{pattern!r:.80} has lookaround, a reference to a group, or a boundary within it"


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
