"""Watch of a catalogue file that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.catalogue_watch import CatalogueWatch
from tests.support.manual_clock import ManualClock


class Followed:
    """Catalogue file, and the changes that its watch reported."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.changes: list[tuple[tuple[str, ...], frozenset[str]]] = []
        self.write("models: {a: {source: /a}, b: {source: /b}}")
        self.watch = CatalogueWatch(
            str(file), load_catalogue(str(file)), ManualClock(), self.on_change
        )

    async def on_change(self, catalogue: Catalogue, changed: frozenset[str]) -> None:
        self.changes.append((catalogue.names(), changed))

    def write(self, text: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)


async def test_models_that_come_go_and_change_are_told(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "models.yaml")
    await followed.watch.look()
    assert followed.changes == []
    followed.write("models: {b: {source: /other}, c: {source: /c}}")
    await followed.watch.look()
    await followed.watch.look()
    assert followed.changes == [(("b", "c"), frozenset({"a", "b", "c"}))]


async def test_a_route_alone_is_a_change(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "models.yaml")
    text = "models: {a: {source: /a}, b: {source: /b}}\nroutes: {auto: {small: a, large: b}}"
    followed.write(text)
    await followed.watch.look()
    assert followed.changes == [(("a", "b"), frozenset())]


async def test_a_file_that_cannot_be_read_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    followed = Followed(tmp_path / "models.yaml")
    followed.write("models: [")
    for _ in range(3):
        await followed.watch.look()
    assert followed.changes == []
    assert [record.message for record in caplog.records] == ["the catalogue is unchanged"]
    followed.file.unlink()
    await followed.watch.look()
    followed.write("models: {a: {source: /a}}")
    await followed.watch.look()
    assert followed.changes == [(("a",), frozenset({"b"}))]
