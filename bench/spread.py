"""Spread of token numbers over requests: fixed, uniform or log-normal."""

from __future__ import annotations

import math
import random
from enum import StrEnum

import msgspec

from millrace.schemas.errors import ConfigError

_USAGE = "give N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MAX]"
_MAX_TOKENS = 10_000_000


class SpreadKind(StrEnum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


class Spread(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Distribution: fixed at ``low``; uniform from ``low`` to ``high``; or log-normal with the mean
    ``mean`` and the standard deviation ``sigma`` of its logarithm, cut to ``low`` … ``high``."""

    kind: SpreadKind
    low: int = 1
    high: int = _MAX_TOKENS
    mean: float = 0.0
    sigma: float = 0.0

    def draw(self, source: random.Random) -> int:
        """Draw one number of tokens, at least 1."""
        if self.kind is SpreadKind.FIXED:
            return self.low
        if self.kind is SpreadKind.UNIFORM:
            return source.randint(self.low, self.high)
        centre = math.log(self.mean) - self.sigma**2 / 2
        return min(max(round(source.lognormvariate(centre, self.sigma)), self.low), self.high)

    def __str__(self) -> str:
        if self.kind is SpreadKind.FIXED:
            return str(self.low)
        if self.kind is SpreadKind.UNIFORM:
            return f"uniform:{self.low}:{self.high}"
        bound = "" if self.high == _MAX_TOKENS else f":{self.high}"
        return f"lognormal:{self.mean:g}:{self.sigma:g}{bound}"


def fixed(num_tokens: int) -> Spread:
    """Return the constant distribution of ``num_tokens``."""
    return Spread(kind=SpreadKind.FIXED, low=num_tokens, high=num_tokens)


def parse_spread(text: str) -> Spread:
    """Parse a user's text. Raises ConfigError with the accepted forms."""
    try:
        spread = _read(*text.split(":"))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{text!r} is no number of tokens: {_USAGE}") from error
    if not 1 <= spread.low <= spread.high <= _MAX_TOKENS:
        raise ConfigError(f"{text!r} must lie between 1 and {_MAX_TOKENS} tokens, and not fall")
    if spread.kind is SpreadKind.LOGNORMAL and not (
        1 <= spread.mean <= _MAX_TOKENS and 0 < spread.sigma <= 4
    ):
        raise ConfigError(f"{text!r}: the mean is at least 1, and sigma between 0 and 4")
    return spread


def _read(kind: str, *numbers: str) -> Spread:
    """Parse the numbers. Raises ValueError or TypeError for invalid ones."""
    if kind == SpreadKind.UNIFORM:
        low, high = map(int, numbers)
        return Spread(kind=SpreadKind.UNIFORM, low=low, high=high)
    if kind == SpreadKind.LOGNORMAL:
        mean, sigma, *most = numbers
        [high] = map(int, most or (_MAX_TOKENS,))
        return Spread(kind=SpreadKind.LOGNORMAL, mean=float(mean), sigma=float(sigma), high=high)
    if numbers:
        raise ValueError(kind)
    return fixed(int(kind))
