"""Prices and costs of tokens and device time."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

from millrace.schemas.errors import ParameterError
from millrace.schemas.tenants import DEFAULT_CURRENCY, check_currency

_COST_STEP = Decimal("0.000000000001")
_US_PER_HOUR = 3_600_000_000


class PriceBook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices in ``currency``: per million tokens, which the tenant pays, and per hour of one
    device, which is the operator's cost.

    ``version`` names the prices forever.
    """

    version: str
    currency: str = DEFAULT_CURRENCY
    input_per_million: Decimal
    cached_input_per_million: Decimal
    output_per_million: Decimal
    device_per_hour: Decimal = Decimal(0)

    def __post_init__(self) -> None:
        for name in (
            "input_per_million",
            "cached_input_per_million",
            "output_per_million",
            "device_per_hour",
        ):
            price: Decimal = getattr(self, name)
            if not price.is_finite() or price < 0:
                raise ValueError(f"{name} must be a price of 0 or more, got {price}")
        if not self.version:
            raise ValueError("version must not be empty")
        check_currency(self.currency)


def prices_with(prices: PriceBook, own: dict[str, Any] | None) -> PriceBook:
    """Return the prices of an adapter with the price book ``own``.

    With ``own`` None they are ``prices``, the model's. The device price is the model's, unless it
    is in another currency.
    """
    if own is None:
        return prices
    book = msgspec.convert(own, PriceBook)
    if book.currency != prices.currency:
        return book
    return msgspec.structs.replace(book, device_per_hour=prices.device_per_hour)


UNPRICED = PriceBook(
    version="unpriced",
    input_per_million=Decimal(0),
    cached_input_per_million=Decimal(0),
    output_per_million=Decimal(0),
)


def cost(
    prices: PriceBook, prompt_tokens: int, cached_tokens: int, completion_tokens: int
) -> Decimal:
    """Return the exact cost of a request; ``cached_tokens`` of its ``prompt_tokens`` were cached.

    Raises:
        ParameterError: the counts are impossible.
    """
    if not 0 <= cached_tokens <= prompt_tokens or completion_tokens < 0:
        raise ParameterError(
            "cached_tokens",
            f"no request has {prompt_tokens} prompt, {cached_tokens} cached and "
            f"{completion_tokens} completion tokens",
        )
    total = (
        (prompt_tokens - cached_tokens) * prices.input_per_million
        + cached_tokens * prices.cached_input_per_million
        + completion_tokens * prices.output_per_million
    )
    return total.scaleb(-6)


def device_cost(prices: PriceBook, device_us: int) -> Decimal:
    """Return the operator's cost of ``device_us`` of a device, to a millionth of a millionth."""
    return (prices.device_per_hour * device_us / _US_PER_HOUR).quantize(_COST_STEP)
