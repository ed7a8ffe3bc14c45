"""File of KV cache blocks in fixed slots, each with a header that describes its contents."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.kv.block_identity import kept_identity
from millrace.engine.kv.cache import KVCache
from millrace.engine.transfer.memory import checksum_of
from millrace.schemas.errors import ConfigError

_PAGE_BYTES = 4096
_MAGIC = b"mrkv0002"
# Magic, key, stamp, checksum of the contents, and checksum of these fields.
_HEADER = struct.Struct("<8s16sQQI")
_MAX_FILES = 256
_ENDING, _LOCK = ".kv", "lock"


class StoredBlock(NamedTuple):
    """Block that an earlier process wrote. A higher ``stamp`` was written later."""

    stamp: int
    key: bytes
    slot: int


class BlockFile:
    """File of block slots for one process.

    It reuses an earlier process's file of the same identity. ``identity`` names everything that the
    bytes of blocks depend on. Contents are written before their header, and checked by their
    checksum when read, so a write that a crash interrupts leaves no block. ``write`` and ``read``
    may be called on any thread, for different slots.
    """

    def __init__(self, folder: Path, identity: str, block_bytes: int, max_bytes: int) -> None:
        """Open ``folder``.

        Files of other identities that no process holds are removed, the oldest first, until they
        take at most ``max_bytes``, the limit of this file. Raises ConfigError if the folder cannot
        be used.
        """
        self.block_bytes = block_bytes
        self._slot_bytes = -(-(_HEADER.size + block_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self.num_slots = max(0, max_bytes - _PAGE_BYTES) // self._slot_bytes
        if not self.num_slots:
            raise ConfigError(
                f"engine.disk_cache_bytes is {max_bytes}, but one block takes {self._slot_bytes} "
                "bytes; raise it."
            )
        head = blake2b(f"{identity};{block_bytes}".encode()).digest()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # One process at a time, since the processes of a system start at the same moment.
            with (folder / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._fd = _open(folder, head)
                _make_room(folder, head, max_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.disk_cache_path: {folder} cannot be used: {error.strerror or error}."
            ) from error

    def blocks(self) -> list[StoredBlock]:
        """List the blocks in the file, the oldest first.

        Contents are checked when they are read.
        """
        found = []
        room_bytes = os.fstat(self._fd).st_size - _HEADER.size - self.block_bytes
        for slot in range(self.num_slots):
            if self._offset(slot) > room_bytes:
                break
            header = _parsed(os.pread(self._fd, _HEADER.size, self._offset(slot)))
            if header is not None:
                key, stamp, _ = header
                found.append(StoredBlock(stamp, key, slot))
        return sorted(found)

    def write(self, slot: int, key: bytes, stamp: int, pieces: Sequence[memoryview]) -> None:
        """Write the bytes of ``pieces`` to a slot. Raises OSError; the slot is empty then."""
        offset, checksum = self._offset(slot), checksum_of(pieces)
        os.pwrite(self._fd, bytes(_HEADER.size), offset)
        done = os.pwritev(self._fd, pieces, offset + _HEADER.size)
        if done != self.block_bytes:
            raise OSError(errno.ENOSPC, f"{done} of {self.block_bytes} bytes were written")
        packed = _HEADER.pack(_MAGIC, key, stamp, checksum, 0)
        packed = packed[:-4] + zlib.crc32(packed[:-4]).to_bytes(4, "little")
        os.pwrite(self._fd, packed, offset)

    def read(self, slot: int, key: bytes, pieces: Sequence[memoryview]) -> bool:
        """Read a slot into ``pieces``.

        Returns False if its contents are not those written for ``key``. Raises OSError.
        """
        offset = self._offset(slot)
        header = _parsed(os.pread(self._fd, _HEADER.size, offset))
        if header is None or header[0] != key:
            return False
        done = os.preadv(self._fd, pieces, offset + _HEADER.size)
        return done == self.block_bytes and checksum_of(pieces) == header[2]

    def close(self) -> None:
        """Close the file, so that another process can have it."""
        os.close(self._fd)

    def _offset(self, slot: int) -> int:
        return _PAGE_BYTES + slot * self._slot_bytes


def _open(folder: Path, head: bytes) -> int:
    """Open a file that no other process holds: one with the same head, or a new one."""
    taken = [fd for name in _names(folder) if (fd := _locked(folder / name)) is not None]
    chosen = next((fd for fd in taken if os.pread(fd, len(head), 0) == head), None)
    for fd in taken:
        if fd != chosen:
            os.close(fd)
    return _new(folder, head) if chosen is None else chosen


def _new(folder: Path, head: bytes) -> int:
    for number in range(_MAX_FILES):
        path = folder / f"{number}{_ENDING}"
        if not path.exists() and (fd := _locked(path)) is not None:
            os.pwrite(fd, head, 0)
            return fd
    raise BlockingIOError(errno.EAGAIN, "too many processes use it")


def _make_room(folder: Path, head: bytes, spare_bytes: int) -> None:
    """Remove files of other kinds that no process holds until they take at most ``spare_bytes``.

    Files of this kind stay, since other processes may be about to start.
    """
    idle = []
    for path in (folder / name for name in _names(folder)):
        fd = _locked(path)
        if fd is not None:
            status = os.fstat(fd)
            if os.pread(fd, len(head), 0) != head:
                idle.append((status.st_mtime_ns, status.st_blocks * 512, path))
            os.close(fd)
    total = sum(size for _, size, _ in idle)
    for _, size, path in sorted(idle):
        if total <= spare_bytes:
            return
        path.unlink()
        total -= size


def _names(folder: Path) -> Iterable[str]:
    return sorted(path.name for path in folder.glob(f"*{_ENDING}"))


def _locked(path: Path) -> int | None:
    """Open and lock a file; None if another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    os.close(fd)
    return None


def _parsed(header: bytes) -> tuple[bytes, int, int] | None:
    """Return key, stamp and checksum of a header; None if it is incomplete or damaged."""
    if len(header) < _HEADER.size or header[:8] != _MAGIC:
        return None
    _, key, stamp, checksum, own = _HEADER.unpack(header)
    return (key, stamp, checksum) if own == zlib.crc32(header[:-4]) else None


def block_file(
    path: Path, config: ResolvedEngineConfig, cache: KVCache, *, is_row_exact: bool
) -> BlockFile:
    """Open the file that ``config`` names, for an engine of the checkpoint folder ``path``.

    ``is_row_exact`` is that of its runner; it tells which products compute the blocks. Raises
    ConfigError if there can be no file.
    """
    assert config.disk_cache_path is not None
    identity = kept_identity("disk_cache_path", path, config, cache, is_row_exact=is_row_exact)
    num_layers, _, layer_bytes = cache.blocks.shape
    return BlockFile(
        Path(config.disk_cache_path).expanduser(),
        identity,
        num_layers * layer_bytes,
        config.disk_cache_bytes,
    )
