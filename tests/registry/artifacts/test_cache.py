"""Copies of stored folders: complete or absent, stored once, and resumed after an interruption."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.registry.artifacts.cache import ArtifactCache
from millrace.registry.artifacts.store import (
    ModelSourceError,
    StoredFile,
    StoredFolder,
    StoreUnreachableError,
)
from tests.registry.artifacts.conftest import Bucket
from tests.support.system import DEAD_PROXIES

ALL = ("*",)


def _objects(root: Path) -> list[str]:
    return sorted(file.name for file in (root / "objects").iterdir())


def test_a_folder_is_copied_once_and_again_when_it_has_changed(
    bucket: Bucket, cache: ArtifactCache, tmp_path: Path
) -> None:
    bucket.put("m/config.json", b"{}")
    bucket.put("m/sub/weights.bin", b"w" * 3_000_000)
    address = f"{bucket.address}/m"
    first = cache.fetch(address, ALL, "Model m")
    assert (first / "config.json").read_bytes() == b"{}"
    assert (first / "sub" / "weights.bin").read_bytes() == b"w" * 3_000_000
    before = (first / "sub" / "weights.bin").stat().st_ino
    assert cache.fetch(f"{address}/", ALL, "Model m") == first
    bucket.put("m/config.json", b"{1}")
    second = cache.fetch(address, ALL, "Model m")
    assert second != first
    assert (second / "config.json").read_bytes() == b"{1}"
    assert (first / "config.json").read_bytes() == b"{}"
    # All snapshots share one copy of the weights.
    assert (second / "sub" / "weights.bin").stat().st_ino == before
    assert len(_objects(tmp_path / "artifacts")) == 3
    assert not list((tmp_path / "artifacts" / "partial").iterdir())


def test_only_what_is_wanted_is_fetched(bucket: Bucket, cache: ArtifactCache) -> None:
    bucket.put("m/config.json", b"{}")
    bucket.put("m/training.log", b"long")
    folder = cache.fetch(f"{bucket.address}/m", ("*.json",), "Model m")
    assert [one.name for one in folder.iterdir() if not one.name.startswith(".")] == ["config.json"]
    with pytest.raises(ModelSourceError, match=r"Model m: there are no files of it at s3://"):
        cache.fetch(f"{bucket.address}/m", ("*.safetensors",), "Model m")


def test_failed_fetch_is_reported(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelSourceError, match=r"Model m: s3://nobucket/m does not exist"):
        cache.fetch("s3://nobucket/m", ALL, "Model m")
    bucket.put("m/config.json", b"{}")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(StoreUnreachableError, match=r"Model m: s3://\S+/m cannot be read"):
        cache.fetch(f"{bucket.address}/m", ALL, "Model m")


def test_a_store_of_this_machine_is_reached_without_the_proxies_of_the_shell(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("m/config.json", b"{}")
    for name, value in DEAD_PROXIES.items():
        monkeypatch.setenv(name, value)
    folder = cache.fetch(f"{bucket.address}/m", ALL, "Model m")
    assert (folder / "config.json").read_bytes() == b"{}"


def test_without_credentials(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Where a cloud's own machines would be told theirs.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelSourceError, match="needs credentials"):
        cache.fetch(f"{bucket.address}/m", ALL, "Model m")


def test_a_store_that_is_away_is_not_needed_for_what_is_here(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("m/config.json", b"{}")
    here = cache.fetch(f"{bucket.address}/m", ALL, "Model m")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert cache.fetch(f"{bucket.address}/m", ALL, "Model m") == here


class _Cutting(StoredFolder):
    """Server that ends each answer after some bytes; ``starts`` are the offsets of the requests."""

    starts: list[int]
    after = 1_500_000

    def read(self, file: StoredFile, start: int) -> Iterator[bytes]:
        self.starts.append(start)
        left = self.after
        for chunk in super().read(file, start):
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                raise StoreUnreachableError("cut")


def test_a_transfer_that_is_cut_goes_on_where_it_was(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = os.urandom(4_000_000)
    bucket.put("m/weights.bin", contents)
    starts: list[int] = []
    monkeypatch.setattr(_Cutting, "starts", starts, raising=False)
    monkeypatch.setattr("millrace.registry.artifacts.cache.StoredFolder", _Cutting)
    folder = cache.fetch(f"{bucket.address}/m", ALL, "Model m")
    assert (folder / "weights.bin").read_bytes() == contents
    assert starts == [0, 1_500_000, 3_000_000]


def test_a_process_that_dies_leaves_its_part_to_the_next(
    bucket: Bucket, cache: ArtifactCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = os.urandom(6_000_000)
    bucket.put("m/weights.bin", contents)
    address = f"{bucket.address}/m"
    program = f"""
import os, signal
from pathlib import Path
from millrace.registry.artifacts import cache
from millrace.registry.artifacts.store import StoredFolder

class Dying(StoredFolder):
    def read(self, file, start):
        for number, chunk in enumerate(super().read(file, start)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

cache._READ_BYTES = 1
cache.StoredFolder = Dying
cache.ArtifactCache(Path({str(tmp_path / "artifacts")!r})).fetch({address!r}, ("*",), "m")
"""
    died = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    starts: list[int] = []
    monkeypatch.setattr(_Cutting, "starts", starts, raising=False)
    monkeypatch.setattr(_Cutting, "after", 1 << 40)
    monkeypatch.setattr("millrace.registry.artifacts.cache.StoredFolder", _Cutting)
    folder = cache.fetch(f"{bucket.address}/m", ALL, "Model m")
    assert (folder / "weights.bin").read_bytes() == contents
    assert len(starts) == 1
    assert starts[0] > 0


def test_processes_that_ask_at_once_share_one_transfer(
    bucket: Bucket, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("m/weights.bin", os.urandom(4_000_000))
    reads: list[str] = []
    own = StoredFolder.read

    def counted(folder: StoredFolder, file: StoredFile, start: int) -> Iterator[bytes]:
        reads.append(file.path)
        return own(folder, file, start)

    monkeypatch.setattr(StoredFolder, "read", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(cache.fetch(f"{bucket.address}/m", ALL, "Model m"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert reads == ["weights.bin"]


def test_what_was_used_least_recently_makes_room(bucket: Bucket, tmp_path: Path) -> None:
    small = ArtifactCache(tmp_path / "artifacts", max_bytes=2_500_000)
    for name in ("a", "b", "c"):
        bucket.put(f"{name}/weights.bin", name.encode() * 1_000_000)
    a = small.fetch(f"{bucket.address}/a", ALL, "a")
    opened = (a / "weights.bin").open("rb")
    b = small.fetch(f"{bucket.address}/b", ALL, "b")
    os.utime(a / ".complete", (time.time() - 60, time.time() - 60))
    small.fetch(f"{bucket.address}/b", ALL, "b")
    c = small.fetch(f"{bucket.address}/c", ALL, "c")
    assert not a.exists()
    assert b.exists()
    assert c.exists()
    assert len(_objects(tmp_path / "artifacts")) == 2
    with opened:  # an open file stays readable
        assert opened.read(1) == b"a"


def test_room_is_made_while_another_address_comes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of one address have come and are not linked yet when the other makes room."""
    bucket.put("a/weights.bin", b"a" * 1_000)
    bucket.put("a/zz.bin", b"z" * 1_000)
    bucket.put("b/weights.bin", b"b" * 1_000)
    root = tmp_path / "artifacts"
    read = StoredFolder.read
    others: list[Path] = []

    def interrupted(folder: StoredFolder, file: StoredFile, start: int) -> Iterator[bytes]:
        yield from read(folder, file, start)
        if not others:
            others.append(root)
            other = ArtifactCache(root, 1).fetch(f"{bucket.address}/b", ALL, "Model b")
            assert (other / "weights.bin").read_bytes() == b"b" * 1_000

    monkeypatch.setattr(StoredFolder, "read", interrupted)
    folder = ArtifactCache(root).fetch(f"{bucket.address}/a", ALL, "Model a")
    assert others
    assert (folder / "weights.bin").read_bytes() == b"a" * 1_000
    assert (folder / "zz.bin").read_bytes() == b"z" * 1_000


def test_a_link_and_its_contents_are_one_step_for_others(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("a/weights.bin", b"a" * 1_000)
    root = tmp_path / "artifacts"
    cleaned, at_link = threading.Event(), threading.Event()

    def clean() -> None:
        at_link.wait(10)
        with ArtifactCache(root)._locked("objects"):
            cleaned.set()

    link_to = Path.hardlink_to

    def slow(link: Path, target: Path) -> None:
        at_link.set()
        assert not cleaned.wait(0.05)
        link_to(link, target)

    monkeypatch.setattr(Path, "hardlink_to", slow)
    cleaner = threading.Thread(target=clean)
    cleaner.start()
    folder = ArtifactCache(root).fetch(f"{bucket.address}/a", ALL, "Model a")
    cleaner.join(10)
    assert cleaned.is_set()
    assert (folder / "weights.bin").read_bytes() == b"a" * 1_000


def test_a_full_disk_is_told_and_leaves_nothing_that_counts(
    bucket: Bucket, tmp_path: Path, cache: ArtifactCache
) -> None:
    bucket.put("m/weights.bin", b"w" * 2_000_000)
    (tmp_path / "artifacts").write_bytes(b"a file in the way")
    with pytest.raises(ModelSourceError, match=r"cannot be stored in .*artifacts"):
        cache.fetch(f"{bucket.address}/m", ALL, "Model m")
