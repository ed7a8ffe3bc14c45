"""Bounds of numbers, said so that the library of grammars keeps them."""

from __future__ import annotations

from typing import Any

from millrace.registry.json_schemas.walk import number

_STEP = 1e-6


def kept_bounds(schema: dict[str, Any]) -> None:
    """Change bounds between which there is no whole number but an excluded one at their end.

    The library lets that one in: of the numbers above 2 and up to 2.5 it admits 2. So they are said
    to begin a millionth of the way further on.
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
    """Whether the first is whole and less than 1 from the other."""
    return whole == int(whole) and 0 < abs(other - whole) < 1
