"""Price books in the store: a version names its prices for ever."""

from __future__ import annotations

import logging
from decimal import Decimal

import msgspec
import pytest

from millrace.registry.catalogue import Catalogue, ModelEntry
from millrace.registry.pricing import UNPRICED, PriceBook
from millrace.telemetry.rollups.prices import record_prices
from millrace.telemetry.store.store import Store
from tests.support.manual_clock import ManualClock

PRICES = PriceBook(
    version="2026-11",
    input_per_million=Decimal("0.10"),
    cached_input_per_million=Decimal("0.05"),
    output_per_million=Decimal("0.4000000000001"),
    device_per_hour=Decimal("2.5"),
)


def catalogue(**prices: PriceBook) -> Catalogue:
    return Catalogue(
        {
            name: ModelEntry(name=name, source=f"/models/{name}", prices=book)
            for name, book in prices.items()
        }
    )


async def test_each_version_is_noted_once(store: Store) -> None:
    clock = ManualClock()
    first_ns = clock.now_ns()
    assert await record_prices(store, catalogue(a=PRICES, b=UNPRICED), clock) == []
    clock.skip(1000.0)
    later = msgspec.structs.replace(PRICES, version="2027-01", input_per_million=Decimal("0.20"))
    # More digits than the store keeps are no change.
    assert await record_prices(store, catalogue(a=PRICES), clock) == []
    assert await record_prices(store, catalogue(a=later, c=PRICES), clock) == []
    rows = await store.rows(
        "SELECT model, version, input_per_million, device_per_hour, first_seen FROM prices "
        "ORDER BY model, version"
    )
    assert [row[:4] for row in rows] == [
        ("a", "2026-11", Decimal("0.1"), Decimal("2.5")),
        ("a", "2027-01", Decimal("0.2"), Decimal("2.5")),
        ("b", "unpriced", Decimal(0), Decimal(0)),
        ("c", "2026-11", Decimal("0.1"), Decimal("2.5")),
    ]
    assert rows[0][4].timestamp() == first_ns / 1e9
    assert rows[1][4].timestamp() == first_ns / 1e9 + 1000


async def test_a_version_that_changes_its_prices_is_refused_and_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await record_prices(store, catalogue(a=PRICES), ManualClock())
    dearer = msgspec.structs.replace(PRICES, output_per_million=Decimal("0.5"), currency="EUR")
    with caplog.at_level(logging.ERROR):
        (changed,) = await record_prices(store, catalogue(a=dearer), ManualClock())
    assert (changed.model, changed.now.output_per_million) == ("a", Decimal("0.5"))
    (record,) = caplog.records
    assert "the prices of a changed under the version '2026-11'" in record.getMessage()
    assert "currency from USD to EUR" in record.getMessage()
    assert "output_per_million from 0.400000000000 to 0.5" in record.getMessage()
    assert "input_per_million from" not in record.getMessage().replace("output_per_million", "")
    rows = await store.rows("SELECT output_per_million, currency FROM prices")
    assert rows == [(Decimal("0.4"), "USD")]
