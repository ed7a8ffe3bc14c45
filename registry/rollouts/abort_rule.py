"""Abort rule of a rollout: ``error_rate>0.01 or ttft_p95>1.5x``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from millrace.schemas.errors import ParameterError

ERROR_RATE = "error_rate"
PERCENTILES = (50, 90, 95, 99)
TIMES = ("ttft", "tpot", "total")
_METRICS = (ERROR_RATE, *(f"{time}_p{percent}" for time in TIMES for percent in PERCENTILES))
_CONDITION = re.compile(
    r"\s*(?P<metric>[a-z0-9_]+)\s*(?P<sign>>=?)\s*(?P<bound>[0-9]+(?:\.[0-9]+)?)(?P<unit>x|us|ms|s|%)?\s*"
)
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_FIELD = "abort_if"


class VersionOutcome(NamedTuple):
    """Outcome of a request of a version, and when it ended (UTC epoch, ns). Times are in
    milliseconds; None if the request did not get so far.
    """

    at_ns: int
    is_error: bool
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    total_ms: float | None = None


class Seen(NamedTuple):
    """Figures of a version over ``num_requests`` requests: ``error_rate`` and percentiles in
    milliseconds, by metric name.
    """

    num_requests: int
    figures: Mapping[str, float]

    @classmethod
    def of(cls, outcomes: list[VersionOutcome]) -> Seen:
        """Compute the figures. Percentiles are nearest ranks: observed values."""
        figures = {}
        if outcomes:
            figures[ERROR_RATE] = sum(one.is_error for one in outcomes) / len(outcomes)
        for time in TIMES:
            values = sorted(
                value for one in outcomes if (value := getattr(one, f"{time}_ms")) is not None
            )
            for percent in PERCENTILES if values else ():
                rank = math.ceil(percent / 100 * len(values))
                figures[f"{time}_p{percent}"] = values[rank - 1]
        return cls(len(outcomes), figures)


class Condition(NamedTuple):
    """Condition that ``metric`` exceeds ``bound``.

    The bound is a share, milliseconds, or a factor of the stable version's value if
    ``is_relative``. With ``or_equal`` the bound itself counts too.
    """

    metric: str
    bound: float
    is_relative: bool
    or_equal: bool

    def breach(self, candidate: Seen, stable: Seen) -> str | None:
        """Return the breach in words; None if there is none, or too little is known."""
        value, bound = candidate.figures.get(self.metric), self.bound
        if value is None:
            return None
        told = ""
        if self.is_relative:
            usual = stable.figures.get(self.metric)
            if usual is None:
                return None
            bound *= usual
            told = f", {self.bound:g} times that of the stable version"
        if value > bound or (self.or_equal and value == bound):
            return f"{self.metric} is {self._said(value)}, over {self._said(bound)}{told}"
        return None

    def _said(self, value: float) -> str:
        return f"{value:.2%}" if self.metric == ERROR_RATE else f"{value:.4g} ms"


class AbortRule:
    """Rule of conditions, one of which is enough. Immutable."""

    def __init__(self, conditions: tuple[Condition, ...] = ()) -> None:
        self.conditions = conditions

    @classmethod
    def parse(cls, text: str) -> AbortRule:
        """Parse ``METRIC>BOUND`` or ``>=``, several joined by ``or``.

        A bound is a share or a percentage for ``error_rate``, and a time with ``us``, ``ms`` or
        ``s`` for the others. ``1.5x`` means a factor of the stable version's value. Empty text is
        no condition.

        Raises:
            ParameterError: ("abort_if") the text is invalid.
        """
        if not text.strip():
            return cls()
        return cls(tuple(map(_condition, re.split(r"\bor\b", text))))

    def breach(self, candidate: Seen, stable: Seen) -> str | None:
        """Return the first condition that holds, in words; None if none does."""
        told = (one.breach(candidate, stable) for one in self.conditions)
        return next((one for one in told if one is not None), None)


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ParameterError(
            _FIELD,
            f"{_FIELD} must be conditions such as error_rate>0.01 or ttft_p95>1.5x, joined by or; "
            f"got {text.strip()!r:.200}.",
        )
    metric, unit = found["metric"], found["unit"]
    if metric not in _METRICS:
        raise ParameterError(
            _FIELD, f"{_FIELD} has no metric {metric!r:.100}; use one of {', '.join(_METRICS)}."
        )
    bound, is_time = float(found["bound"]), metric != ERROR_RATE
    if unit != "x" and is_time is (unit not in _MS):
        needs = "a time, as in 800ms, or 1.5x" if is_time else "a share, as in 0.01 or 1%, or 1.5x"
        raise ParameterError(_FIELD, f"{_FIELD}: {metric} is compared with {needs}.")
    if metric == ERROR_RATE and unit != "x":
        bound = bound / 100 if unit == "%" else bound
        if bound > 1:
            raise ParameterError(_FIELD, f"{_FIELD}: an error_rate is at most 1, or 100%.")
    return Condition(metric, bound * _MS.get(unit, 1.0), unit == "x", found["sign"] == ">=")
