"""``millrace generate`` with a model and an adapter that are in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.registry.adapters import adapter_folder
from millrace.registry.artifacts.cache import ArtifactCache
from millrace.registry.checkpoints.adapters.outline import adapter_version
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.errors import AdapterError
from millrace.schemas.models.adapters import AdapterRef
from tests.cli.offline.generating import generate
from tests.registry.artifacts.conftest import Bucket, bucket, cache, s3_url
from tests.support.adapters import write_adapter

__all__ = ["bucket", "cache", "s3_url"]

LINE = {"prompt_token_ids": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_a_model_and_its_adapter_from_a_bucket(
    tmp_path: Path, checkpoint: Path, bucket: Bucket, cache: ArtifactCache
) -> None:
    del cache
    model = bucket.put_folder(checkpoint, "models/tiny")
    folder = write_adapter(tmp_path / "sql", read_model_config(checkpoint))
    adapter = bucket.put_folder(folder, "adapters/sql")
    lines = [LINE | {"adapter": name} for name in ("sql", "")]
    options = ("--adapter", f"sql={adapter}")
    code, stored = generate(tmp_path, model, lines, *options)
    assert code == 0
    code, local = generate(tmp_path, checkpoint, lines, "--adapter", f"sql={folder}")
    assert [one["token_ids"] for one in stored] == [one["token_ids"] for one in local]


def test_a_version_is_what_it_was_or_it_is_refused(
    tmp_path: Path, checkpoint: Path, bucket: Bucket, cache: ArtifactCache
) -> None:
    del cache
    config = read_model_config(checkpoint)
    first = write_adapter(tmp_path / "first", config)
    address = bucket.put_folder(first, "adapters/sql")
    ref = AdapterRef(name="sql", version=adapter_version(first), source=address)
    assert adapter_version(adapter_folder(address, "sql", ref.version)) == ref.version
    second = write_adapter(tmp_path / "second", config, seed=1)
    bucket.put_folder(second, "adapters/sql")
    newest = adapter_folder(address, "sql")
    assert adapter_version(newest) == adapter_version(second)
    # The copy of what it was is still here.
    assert adapter_version(adapter_folder(address, "sql", ref.version)) == ref.version
    with pytest.raises(AdapterError, match="have changed since it was offered"):
        adapter_folder(address, "sql", "0123456789abcdef")
    with pytest.raises(AdapterError, match="have changed since it was offered"):
        adapter_folder(str(second), "sql", ref.version)
