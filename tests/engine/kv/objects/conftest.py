"""Stores of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from millrace.engine.kv.objects.block_objects import open_store
from tests.engine.kv.objects.faulty_s3 import FaultyS3
from tests.support.engine.s3 import BUCKET, S3Server, s3_environment

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TIMEOUT_S = 5.0


class StoreUnderTest(NamedTuple):
    """Empty store; ``url`` is its setting, empty for a store in this process's memory."""

    store: ObjectStore
    url: str


@pytest.fixture(scope="package")
def moto() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "folder", "s3"])
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreUnderTest:
    if request.param == "memory":
        from obstore.store import MemoryStore

        return StoreUnderTest(MemoryStore(), "")
    url = (tmp_path / "objects").as_uri()
    if request.param == "s3":
        moto: S3Server = request.getfixturevalue("moto")
        for name, value in s3_environment(moto.url).items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/{tmp_path.name}"
    return StoreUnderTest(open_store(url, TIMEOUT_S), url)


@pytest.fixture
def faulty(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Start a faulty proxy of the S3 server and name it in the environment."""
    with FaultyS3(moto.port) as server:
        for name, value in s3_environment(server.url).items():
            monkeypatch.setenv(name, value)
        yield server
