"""Reader of hyper-parameters in a JSON object, with errors that name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.schemas.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError if there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {_kind(data)}.")
    return data


class JsonFields:
    """Typed access to the fields of one JSON object.

    A field that is absent or null has its ``default``; without a default it is missing. Every
    method raises CheckpointError naming the file and the field.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], *, prefix: str = "") -> None:
        """Create the object; ``prefix`` precedes the names of fields in errors."""
        self.path = path
        self._data = data
        self._prefix = prefix

    def with_section(self, name: str) -> JsonFields:
        """Return these fields, overridden by the fields of the object ``name``, if there is one."""
        section = self._data.get(name)
        if not isinstance(section, dict):
            return self
        return JsonFields(self.path, {**self._data, **section})

    def inside(self, name: str) -> JsonFields:
        """Return the fields of the object ``name``; none if there is no such object."""
        data = self.mapping(name) or {}
        return JsonFields(self.path, data, prefix=f"{self._prefix}{name}.")

    def bad(self, name: str, expected: str) -> CheckpointError:
        """Return the error to raise for a field with an invalid value."""
        value = self._data.get(name)
        field = f"{self.path}: field {self._prefix}{name}"
        if value is None:
            return CheckpointError(f"{field} is missing; it must be {expected}.")
        return CheckpointError(f"{field} must be {expected}, got {value!r:.80}.")

    def is_null(self, name: str) -> bool:
        """Return whether the field exists and is null."""
        return name in self._data and self._data[name] is None

    def get(self, name: str) -> Any:
        """Return the raw value; None if absent."""
        return self._data.get(name)

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self._data.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.bad(name, "a positive integer")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._data.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.bad(name, "a positive number")
        if not math.isfinite(value) or value <= 0:
            raise self.bad(name, "a positive number")
        return float(value)

    def number(self, name: str) -> float | None:
        """Return a finite number; None if absent."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.bad(name, "a number")
        if not math.isfinite(value):
            raise self.bad(name, "a finite number")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(name, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object; None if absent."""
        value = self._data.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise self.bad(name, "a JSON object")

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        value = self._data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
            raise self.bad(name, "a list of strings")
        return tuple(value)

    def positive_pair(self, name: str) -> tuple[int, int]:
        """Return a list of two whole numbers of at least 1."""
        value = self._data.get(name)
        items = value if isinstance(value, list) else []
        if len(items) != 2 or any(type(item) is not int or item < 1 for item in items):
            raise self.bad(name, "a list of two positive integers")
        return items[0], items[1]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return a token id or a list of token ids as a tuple; empty if absent."""
        value = self._data.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(not isinstance(x, int) or isinstance(x, bool) or x < 0 for x in ids):
            raise self.bad(name, "a token id or a list of token ids")
        return tuple(ids)


def _kind(value: object) -> str:
    return "an array" if isinstance(value, list) else f"{value!r:.40}"
