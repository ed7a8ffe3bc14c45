"""Parameters of saved queries, declared in the comments at their head, and their validation."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from millrace.schemas.errors import ParameterError

MAX_STEPS = 2_000
# DateTime64(6) ends in 2299.
_MAX_TIME_S = 10_413_792_000
_MAX_SHOWN = 80

_PLACE = re.compile(r"\{(\w+):\s*(\w+(?:\([^)]*\))?)\}")
_COMMENT = re.compile(r"^-- param (\w+): (.*?)(?: \(default (\S+)\))?$", re.MULTILINE)
_CHOICES = re.compile(r"\bone of (\w+(?:\|\w+)+)")
_LIMIT = re.compile(r"\bat most (\d+)")
_INTEGER = re.compile(r"^(U?)Int(8|16|32|64)$")

Value = str | int | float


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """Parameter: its ClickHouse type, its default (None: it is required), and the limit in its
    comment: ``one of a|b``, ``at most 500``."""

    name: str
    type: str
    default: str | None = None
    choices: tuple[str, ...] = ()
    limit: int | None = None

    def read(self, value: Value) -> Value:
        """Convert a value to the parameter's type. Raises ParameterError."""
        match = _INTEGER.match(self.type)
        if match is not None:
            return self._integer(value, is_unsigned=bool(match[1]), num_bits=int(match[2]))
        if self.type.startswith("Float"):
            try:
                return float(value)
            except ValueError:
                raise self._refuse(f"must be a number, got {_short(value)}") from None
        text = str(value)
        if self.choices and text and text not in self.choices:
            known = ", ".join(self.choices)
            raise self._refuse(f"must be one of {known}, or empty; got {_short(value)}")
        if "\0" in text:
            raise self._refuse("must not hold a NUL character")
        return text

    def _integer(self, value: Value, *, is_unsigned: bool, num_bits: int) -> int:
        try:
            number = int(value) if not isinstance(value, float) else int(str(value))
        except ValueError:
            raise self._refuse(f"must be a whole number, got {_short(value)}") from None
        least = 0 if is_unsigned else -(1 << (num_bits - 1))
        most = (1 << (num_bits if is_unsigned else num_bits - 1)) - 1
        if self.limit is not None:
            most = self.limit
        if not least <= number <= most:
            raise self._refuse(f"must be from {least} to {most}, got {_short(value)}")
        return number

    def _refuse(self, why: str) -> ParameterError:
        return ParameterError(self.name, f"{self.name} {why}.")


def parameters_of(sql: str, comments: str) -> dict[str, Parameter]:
    """Return the parameters with places in a query's text, by name; the last of several comments on
    one counts."""
    described = {match[1]: (match[2], match[3]) for match in _COMMENT.finditer(comments)}
    parameters = {}
    for name, type_name in _PLACE.findall(sql):
        words, default = described.get(name, ("", None))
        choices = _CHOICES.search(words)
        limit = _LIMIT.search(words)
        parameters[name] = Parameter(
            name=name,
            type=type_name,
            default=None if default is None else default.strip("'"),
            choices=tuple(choices[1].split("|")) if choices else (),
            limit=int(limit[1]) if limit else None,
        )
    return parameters


def read_values(
    query: str, parameters: Mapping[str, Parameter], given: Mapping[str, Value], now_s: float
) -> dict[str, Value]:
    """Return the value of each parameter.

    Raises ParameterError for a parameter that is unknown, missing, or not allowed by its type or
    comment, and for an invalid range.
    """
    unknown = sorted(given.keys() - parameters.keys())
    if unknown:
        known = ", ".join(sorted(parameters)) or "none"
        name = f"{unknown[0]:.60}"
        raise ParameterError(name, f"{query} has no parameter {name!r}; it has {known}.")
    values: dict[str, Value] = {}
    for name, parameter in parameters.items():
        value = given.get(name, parameter.default)
        if value is None:
            raise ParameterError(name, f"{query} needs the parameter {name!r}.")
        values[name] = parameter.read(value)
    _check_range(values, now_s)
    return values


def _check_range(values: Mapping[str, Value], now_s: float) -> None:
    bounds = {}
    for name in ("from_s", "to_s"):
        value = values.get(name)
        if not isinstance(value, int):
            return
        if abs(value) > _MAX_TIME_S:
            raise ParameterError(name, f"{name} is a Unix time in seconds, got {value}.")
        bounds[name] = value if value > 0 else now_s + value
    length_s = bounds["to_s"] - bounds["from_s"]
    if length_s <= 0:
        raise ParameterError("from_s", "from_s must be before to_s.")
    step_s = values.get("step_s")
    if isinstance(step_s, int) and (step_s < 1 or length_s > MAX_STEPS * step_s):
        least = max(1, int(length_s // MAX_STEPS) + 1)
        raise ParameterError(
            "step_s",
            f"step_s must be at least {least} for a range of {length_s:.0f} s, which makes at most "
            f"{MAX_STEPS} steps; got {step_s}.",
        )


def _short(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
