"""An S3 server on this machine."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import from_url

from millrace.registry.artifacts.cache import ArtifactCache
from millrace.runtime.addresses import open_directly


class Bucket:
    """A bucket of its own for a test."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        made = urllib.request.Request(f"{url}/{name}", method="PUT")
        open_directly(made, timeout_s=10.0).close()
        self._store = from_url(f"s3://{name}", client_options={"allow_http": True})

    @property
    def address(self) -> str:
        return f"s3://{self.name}"

    def put(self, path: str, contents: bytes) -> None:
        obstore.put(self._store, path, contents)

    def put_folder(self, folder: Path, path: str) -> str:
        """Put the files of a folder under a path, and return its address."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{path}/{file.relative_to(folder)}", file.read_bytes())
        return f"{self.address}/{path}"


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in {
        "AWS_ENDPOINT_URL": s3_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return Bucket(s3_url, f"b{abs(hash(request.node.nodeid))}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactCache:
    """Return the cache that this process and its children use."""
    monkeypatch.setenv("MILLRACE_ARTIFACTS__PATH", str(tmp_path / "artifacts"))
    return ArtifactCache(tmp_path / "artifacts")
