"""A small disk of its own for a test to fill: a tmpfs, which root can mount."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_MIB = 1024 * 1024
_STEPS_BYTES = (_MIB, 4_096)


class SmallDisk:
    """Disk mounted at the folder ``path``. Its files are in memory and lost at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free_bytes(self) -> int:
        state = os.statvfs(self.path)
        return state.f_bavail * state.f_frsize

    def fill(self) -> None:
        """Fill all free pages with a new file, including pages freed since the last call."""
        with self._filler.open("ab") as file:
            size = file.tell()
            for step in _STEPS_BYTES:
                while self._grow(file.fileno(), size, step):
                    size += step

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    @staticmethod
    def _grow(descriptor: int, size: int, step: int) -> bool:
        try:
            os.posix_fallocate(descriptor, size, step)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    @property
    def _filler(self) -> Path:
        return self.path / "filler"


class NoDiskError(Exception):
    """Mounting is not permitted here, which takes root; the message is the output of ``mount``."""


@contextlib.contextmanager
def mounted_disk(path: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Mount a disk on a new folder and always unmount it. Raises NoDiskError."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        raise NoDiskError(mounted.stderr.strip())
    try:
        yield SmallDisk(path)
    finally:
        # Lazily: a process that is just ending may still have a file open.
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[SmallDisk]:
    """The same for a test, which is skipped where it cannot be had."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted_disk(path, size_mib))
        except NoDiskError as error:
            pytest.skip(f"no disk can be mounted here, which takes root: {error}")
        yield disk
