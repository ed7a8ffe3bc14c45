"""Price books of the catalogue in ClickHouse, so that a cost can be computed again."""

from __future__ import annotations

import logging
from decimal import Decimal
from operator import attrgetter

import msgspec

from millrace.registry.catalogue import Catalogue
from millrace.registry.pricing import PriceBook
from millrace.runtime.clock import Clock
from millrace.telemetry.store.store import PlainTable, Store

logger = logging.getLogger(__name__)

_PRICES = (
    "input_per_million",
    "cached_input_per_million",
    "output_per_million",
    "device_per_hour",
)
_KNOWN = """
SELECT model, version, currency, input_per_million, cached_input_per_million, output_per_million,
    device_per_hour
FROM prices FINAL
"""
_STEP = Decimal("0.000000000001")
TABLE = PlainTable(
    "prices",
    ("model", "version", "currency", *_PRICES, "first_seen"),
    (
        "LowCardinality(String)",
        "String",
        "LowCardinality(String)",
        *("Decimal(38, 12)" for _ in _PRICES),
        "DateTime64(3, 'UTC')",
    ),
)


class Changed(msgspec.Struct, frozen=True):
    """Price book version whose prices changed in the catalogue; the ``known`` prices stay."""

    model: str
    known: PriceBook
    now: PriceBook

    def __str__(self) -> str:
        """Return the change and the remedy in a sentence."""
        changes = ", ".join(
            f"{name} from {getattr(self.known, name)} to {getattr(self.now, name)}"
            for name in ("currency", *_PRICES)
            if getattr(self.known, name) != getattr(self.now, name)
        )
        return (
            f"the prices of {self.model} changed under the version {self.now.version!r} "
            f"({changes}): give the new prices a new version in the catalogue"
        )


async def record_prices(store: Store, catalogue: Catalogue, clock: Clock) -> list[Changed]:
    """Add the versions that the store does not know. Known versions are never overwritten: those
    whose prices changed are logged as errors and returned.

    Raises StoreUnavailableError.
    """
    known = await _known(store)
    now_ms = clock.now_ns() // 1_000_000
    changed = []
    new = []
    for model in catalogue.names():
        prices = _as_stored(catalogue.get(model).prices)
        before = known.get((model, prices.version))
        if before is None:
            new.append((model, prices))
        elif before != prices:
            changed.append(Changed(model, before, prices))
    for each in changed:
        logger.error("%s", each, extra={"model": each.model, "version": each.now.version})
    if new:
        stored = attrgetter("version", "currency", *_PRICES)
        rows = [(model, *stored(prices), now_ms) for model, prices in new]
        await store.insert(TABLE, list(zip(*rows, strict=True)), token="")
    return changed


def _as_stored(prices: PriceBook) -> PriceBook:
    rounded = {name: getattr(prices, name).quantize(_STEP) for name in _PRICES}
    return msgspec.structs.replace(prices, **rounded)


async def _known(store: Store) -> dict[tuple[str, str], PriceBook]:
    rows = await store.rows(_KNOWN)
    return {
        (str(model), str(version)): PriceBook(
            version=str(version), currency=str(currency), **dict(zip(_PRICES, prices, strict=True))
        )
        for model, version, currency, *prices in rows
    }
