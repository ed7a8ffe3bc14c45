"""Copies of stored folders on this machine: each content once, shared by all its processes.

objects/SHA256            contents of a file
snapshots/ADDRESS/VERSION a version of a folder, made of links to objects
partial/FILE              the received part of a file
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from millrace.registry.artifacts.store import (
    ModelSourceError,
    StoredFile,
    StoredFolder,
    StoreUnreachableError,
)
from millrace.runtime.binaries import cache_folder
from millrace.runtime.settings import load_config

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 200 * 1024**3
_COMPLETE = ".complete"
_OBJECTS = "objects"
_READ_BYTES = 1 << 20
_ID_CHARACTERS = 32
# Maximum number of times that an interrupted transfer is resumed.
_MAX_RESUMES = 5


class ArtifactCache:
    """Folder of all copies, at most ``max_bytes`` in size, with LRU eviction of snapshots.

    Files that a process has opened stay readable to it.
    """

    def __init__(self, root: Path | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._root = root or cache_folder() / "artifacts"
        self._max_bytes = max_bytes

    def fetch(self, address: str, wanted: tuple[str, ...], about: str) -> Path:
        """Return the current folder at ``address``, with its files that match one of ``wanted``.

        If the store does not answer, the latest local copy is returned. Processes that ask for the
        same folder wait for the first one.

        Raises:
            ModelSourceError: the folder cannot be read and there is no copy.
        """
        try:
            folder = StoredFolder(address, about)
            files = [one for one in folder.files() if _matches(one.path, wanted)]
        except StoreUnreachableError as error:
            latest = self._latest(address)
            if latest is None:
                raise
            _log.warning("%s The copy on this machine is used.", error.message)
            return latest
        if not files:
            raise ModelSourceError(f"{about}: there are no files of it at {address}.")
        target = self._snapshots(address) / _version_of(files)
        if not (target / _COMPLETE).exists():
            try:
                with self._locked(address):
                    if not (target / _COMPLETE).exists():
                        self._download(folder, files, target, about)
                        self._make_room(target)
            except OSError as error:
                raise ModelSourceError(
                    f"{about}: {address} cannot be stored in {self._root}: "
                    f"{error.strerror or error}."
                ) from error
        with contextlib.suppress(OSError):
            os.utime(target / _COMPLETE)
        return target

    def kept(self, address: str, is_it: Callable[[Path], bool]) -> Path | None:
        """Return the latest copy of an address for which ``is_it`` is true."""
        return next(filter(is_it, self._complete(address)), None)

    def _latest(self, address: str) -> Path | None:
        return next(iter(self._complete(address)), None)

    def _complete(self, address: str) -> list[Path]:
        """Return the complete snapshots of an address, latest first."""
        found = [mark.parent for mark in self._snapshots(address).glob(f"*/{_COMPLETE}")]
        return sorted(found, key=_used_ns, reverse=True)

    def _snapshots(self, address: str) -> Path:
        return self._root / "snapshots" / _digest(address.rstrip("/"))

    @contextlib.contextmanager
    def _locked(self, what: str) -> Iterator[None]:
        """Hold the lock of an address, or of the objects. Lock an address before the objects."""
        locks = self._root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / _digest(what.rstrip("/"))).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _download(
        self, folder: StoredFolder, files: list[StoredFile], target: Path, about: str
    ) -> None:
        from tqdm import tqdm

        target.parent.mkdir(parents=True, exist_ok=True)
        total = sum(file.size_bytes for file in files)
        with (
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as made,
            tqdm(
                total=total, unit="B", unit_scale=True, desc=about, disable=not sys.stderr.isatty()
            ) as bar,
        ):
            fresh = Path(made) / "files"
            known = self._known(target.parent)
            for file in files:
                link = fresh / file.path
                link.parent.mkdir(parents=True, exist_ok=True)
                if (contents := known.get(file)) and self._is_linked(link, contents):
                    bar.update(file.size_bytes)
                else:
                    part, digest = self._received(folder, file, str(target.parent), bar)
                    known[file] = self._link_object(link, part, digest)
            listed = [(file, known[file].name) for file in files]
            (fresh / _COMPLETE).write_bytes(msgspec.json.encode(listed))
            if target.exists():  # without its mark: a removal was interrupted
                shutil.rmtree(target)
            fresh.rename(target)

    def _known(self, snapshots: Path) -> dict[StoredFile, Path]:
        """Return the contents of files in earlier snapshots."""
        known: dict[StoredFile, Path] = {}
        for mark in snapshots.glob(f"*/{_COMPLETE}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                listed = msgspec.json.decode(mark.read_bytes(), type=list[tuple[StoredFile, str]])
                known |= {file: self._root / _OBJECTS / name for file, name in listed}
        return known

    def _is_linked(self, link: Path, contents: Path) -> bool:
        """Link ``link`` to existing contents, and return whether they existed."""
        with self._locked(_OBJECTS), contextlib.suppress(FileNotFoundError):
            link.hardlink_to(contents)
            return True
        return False

    def _link_object(self, link: Path, part: Path, digest: str) -> Path:
        """Store a received file as an object, and link ``link`` to it."""
        contents = self._root / _OBJECTS / digest
        # Locked, since other processes remove contents that no snapshot has.
        with self._locked(_OBJECTS):
            contents.parent.mkdir(exist_ok=True)
            if contents.exists():
                part.unlink()
            else:
                part.rename(contents)
            link.hardlink_to(contents)
        return contents

    def _received(
        self, folder: StoredFolder, file: StoredFile, owner: str, bar: Any
    ) -> tuple[Path, str]:
        """Return a file's contents and their digest; resume an interrupted transfer."""
        partial = self._root / "partial"
        partial.mkdir(exist_ok=True)
        part = partial / _digest(f"{owner}\0{file.path}\0{file.tag}\0{file.size_bytes}")
        digest = hashlib.sha256()
        with part.open("ab+") as stream:
            stream.seek(0)
            while block := stream.read(_READ_BYTES):
                digest.update(block)
            done = stream.tell()
            bar.update(done)
            for attempt in range(_MAX_RESUMES + 1):
                try:
                    if done < file.size_bytes:
                        for chunk in folder.read(file, done):
                            stream.write(chunk)
                            digest.update(chunk)
                            done += len(chunk)
                            bar.update(len(chunk))
                    break
                except StoreUnreachableError:
                    if attempt == _MAX_RESUMES:
                        raise
        if done != file.size_bytes:
            part.unlink()
            raise StoreUnreachableError(
                f"{file.path} has {done} bytes instead of {file.size_bytes}. Try again."
            )
        return part, digest.hexdigest()

    def _make_room(self, kept: Path) -> None:
        """Remove the least recently used snapshots until the rest fits, and contents without a
        snapshot.
        """

        def num_bytes() -> int:
            size = 0
            with self._locked(_OBJECTS):
                for file in (self._root / _OBJECTS).iterdir():
                    status = file.stat()
                    if status.st_nlink == 1:
                        file.unlink()
                    else:
                        size += status.st_size
            return size

        marks = (self._root / "snapshots").glob(f"*/*/{_COMPLETE}")
        for snapshot in sorted((mark.parent for mark in marks), key=_used_ns):
            if num_bytes() <= self._max_bytes:
                return
            if snapshot != kept:
                _log.info("removed the copy %s to make room", snapshot)
                (snapshot / _COMPLETE).unlink()
                shutil.rmtree(snapshot)
        num_bytes()


def _matches(path: str, wanted: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in wanted)


def _version_of(files: list[StoredFile]) -> str:
    return _digest("\0".join(f"{one.path}\0{one.size_bytes}\0{one.tag}" for one in files))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_CHARACTERS]


def _used_ns(snapshot: Path) -> int:
    try:
        return (snapshot / _COMPLETE).stat().st_mtime_ns
    except OSError:  # another process has just removed it
        return 0


def artifact_cache() -> ArtifactCache:
    """Return the cache of the ``artifacts`` settings in the environment or its configuration file.
    Raises ConfigError.
    """
    config = load_config(None, os.environ).artifacts
    return ArtifactCache(Path(config.path) if config.path else None, config.max_bytes)
