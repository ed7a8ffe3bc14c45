"""Adapters by their hub ids, from a stand-in for the hub."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from millrace.registry.adapters import AdapterOffer, adapter_folder, check_offer, read_offer
from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.checkpoints.adapters.outline import read_adapter_outline
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.pricing import PriceBook
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import AdapterError
from tests.support.adapters import write_adapter
from tests.support.engine.checkpoints_made import write_checkpoint

_COMMIT = "0123456789abcdef0123456789abcdef01234567"

BOOK = PriceBook(
    version="v",
    input_per_million=Decimal(1),
    cached_input_per_million=Decimal(1),
    output_per_million=Decimal(1),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def asked(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Record the downloads from a hub that has one adapter."""
    write_adapter(tmp_path / _COMMIT, read_model_config(checkpoint), rank=3)
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(tmp_path / _COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_an_adapter_of_the_hub_is_kept_by_its_commit(
    checkpoint: Path, asked: list[dict[str, Any]]
) -> None:
    offer = AdapterOffer(name="sql", model="tiny", source="org/sql@main")
    folder = check_offer(offer, EngineKind.REAL, (), BOOK)
    outline = read_adapter_outline(folder, read_model_config(checkpoint))
    adapter = read_offer(offer, folder, outline, 0)
    assert adapter.source == f"org/sql@{_COMMIT}"
    assert adapter_folder(adapter.source, "sql", adapter.version) == folder
    assert [(one["repository"], one["revision"]) for one in asked] == [
        ("org/sql", "main"),
        ("org/sql", _COMMIT),
    ]
    assert set(asked[0]["allow_patterns"]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with pytest.raises(AdapterError, match="have changed since it was offered"):
        adapter_folder(adapter.source, "sql", "another version")


def test_refusal_of_the_hub_names_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelSourceError, match=r"Adapter sql: org/sql cannot be fetched"):
        adapter_folder("org/sql", "sql")


@pytest.mark.parametrize("source", ["adapters", "./a/b", "../b", "a/b/c", "~/b", "org/sql@a b"])
def test_other_names_are_no_hub_ids(source: str) -> None:
    with pytest.raises(AdapterError, match=r"cannot be found\. Give the absolute path"):
        adapter_folder(source, "sql")
