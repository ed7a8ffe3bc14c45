"""Tolerant reading of JSON from other languages' serializers.

Serializers of Java, C# and Go write ``null`` for unset fields. Those of JavaScript, and of untyped
numbers, write a whole number as a float.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from msgspec import inspect

from millrace.schemas.errors import ParameterError

_Payload = TypeVar("_Payload", bytes, str, bytes | str)

_LISTS = (
    inspect.ListType,
    inspect.VarTupleType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.CollectionType,
)
_MAX_DIGITS = 20  # of a 64-bit integer and its sign


def without_mark(payload: _Payload) -> _Payload:
    """Remove the byte order mark that some programs put before UTF-8."""
    if isinstance(payload, str):
        return payload.removeprefix("\ufeff")
    return payload.removeprefix(codecs.BOM_UTF8)


def tolerated(value: Any, kind: Any, where: str = "") -> Any:
    """Convert an untyped decoded value to a value that a decoder of the type ``kind`` accepts.

    Removes null where a field is optional, and converts whole floats where integers are expected.
    Parts without a type stay unchanged.

    Raises ParameterError, which names the field by its path from ``where``, for a number that is
    not whole or not finite, and for values that JSON cannot hold.
    """
    return _read(value, _info(kind), where)


def whole(value: Any, where: str) -> Any:
    """Convert a whole float to an integer; return other types unchanged.

    Raises ParameterError for any other float, and for an integer of more than 64 bits, which cannot
    be encoded.
    """
    if not isinstance(value, float):
        return value
    if not value.is_integer():
        raise ParameterError(where, f"{where} must be a whole number, got {value:g}.")
    return _within_64_bits(int(value), where)


def whole_items(value: Any, where: str) -> Any:
    """Apply ``whole`` to all numbers in nested lists; only check other values."""
    if isinstance(value, list):
        if set(map(type, value)) == {int}:
            return value
        return [whole_items(item, f"{where}[{i}]") for i, item in enumerate(value)]
    return whole(check_plain(value, where), where)


def without_nulls(value: Any) -> Any:
    """Remove null fields from nested objects."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def check_plain(value: Any, where: str) -> Any:
    """Return ``value`` if JSON can hold it.

    Raises ParameterError for values that only MessagePack has: bytes, times, extensions, NaN,
    infinity, and invalid field names.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ParameterError(where, f"{where} must be a finite number, got {value}.")
        return value
    if isinstance(value, list):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
        return value
    if isinstance(value, dict):
        for name, item in value.items():
            _check_name(name, where)
            check_plain(item, _path(where, name))
        return value
    what = "a time" if isinstance(value, datetime) else "binary data"
    raise ParameterError(where, f"{where} must be a value of JSON, not {what}.")


def _check_name(name: Any, where: str) -> None:
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ParameterError(where, f"{where or 'a job'} must have names of fields that are text.")


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


@cache
def _fields(struct: type) -> Mapping[str, inspect.Field]:
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return {field.encode_name: field for field in kind.fields}


def _read(value: Any, kind: inspect.Type, where: str) -> Any:
    if isinstance(kind, inspect.UnionType):
        return _read_union(value, kind, where)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        return _read_struct(value, kind, where)
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        return _read_dict(value, kind, where)
    if isinstance(kind, _LISTS) and isinstance(value, list):
        if isinstance(kind.item_type, inspect.IntType) and set(map(type, value)) <= {int}:
            return value
        return [_read(item, kind.item_type, f"{where}[{i}]") for i, item in enumerate(value)]
    check_plain(value, where)
    return whole(value, where) if isinstance(kind, inspect.IntType) else value


def _read_union(value: Any, kind: inspect.UnionType, where: str) -> Any:
    """Read a value as the one type of a union that fits it."""
    fitting: list[inspect.Type] = []
    if isinstance(value, dict):
        fitting = [one for one in kind.types if isinstance(one, inspect.DictType)]
        fitting += [one for one in kind.types if _is_struct_of(one, value)]
    elif isinstance(value, list):
        fitting = [one for one in kind.types if isinstance(one, _LISTS)]
    elif isinstance(value, float):
        fitting = [one for one in kind.types if isinstance(one, inspect.IntType)]
        if any(isinstance(one, inspect.FloatType) for one in kind.types):
            fitting = []
    if not fitting:
        return check_plain(value, where)
    return _read(value, fitting[0], where)


def _is_struct_of(kind: inspect.Type, value: dict[Any, Any]) -> bool:
    if not isinstance(kind, inspect.StructType):
        return False
    return kind.tag_field is None or value.get(kind.tag_field) == kind.tag


def _read_struct(value: dict[Any, Any], kind: inspect.StructType, where: str) -> dict[Any, Any]:
    fields = _fields(kind.cls)
    read: dict[Any, Any] = {}
    for name, item in value.items():
        _check_name(name, where)
        field = fields.get(name)
        if item is None and (field is None or not field.required):
            continue
        path = _path(where, name)
        read[name] = check_plain(item, path) if field is None else _read(item, field.type, path)
    return read


def _read_dict(value: dict[Any, Any], kind: inspect.DictType, where: str) -> dict[Any, Any]:
    value_type = kind.value_type
    takes_null = isinstance(value_type, (inspect.AnyType, inspect.NoneType, inspect.UnionType))
    wants_integers = isinstance(kind.key_type, inspect.IntType)
    for name in value:
        if not (wants_integers and isinstance(name, float)):
            _check_name(name, where)
    return {
        _integer(name, _path(where, name)) if wants_integers else name: _read(
            item, value_type, _path(where, name)
        )
        for name, item in value.items()
        if takes_null or item is not None
    }


def _integer(name: Any, where: str) -> Any:
    """Convert a field name to an integer, if it is one. JavaScript objects have only text names."""
    is_digits = isinstance(name, str) and name.removeprefix("-").isdecimal()
    if is_digits and len(name) <= _MAX_DIGITS:
        return _within_64_bits(int(name), where)
    return whole(name, where)


def _within_64_bits(number: int, where: str) -> int:
    if not -(2**63) <= number < 2**64:
        raise ParameterError(where, f"{where} must be an integer of at most 64 bits.")
    return number


def _path(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
