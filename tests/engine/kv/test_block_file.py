"""Blocks in a file: written blocks are read, and no others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kv.block_file import BlockFile
from millrace.schemas.errors import ConfigError

BLOCK_BYTES = 100
SLOT_BYTES = 4096
FOUR_SLOTS = 4096 + 4 * SLOT_BYTES


def _key(number: int) -> bytes:
    return bytes([number]) * 16


def _contents(number: int) -> list[memoryview]:
    return [memoryview(bytes([number, piece]) * 25) for piece in range(2)]


def _read(file: BlockFile, slot: int, key: bytes) -> bytes | None:
    pieces = [bytearray(50), bytearray(50)]
    found = file.read(slot, key, [memoryview(piece) for piece in pieces])
    return b"".join(pieces) if found else None


def _open(folder: Path, identity: str = "model", max_bytes: int = FOUR_SLOTS) -> BlockFile:
    return BlockFile(folder, identity, BLOCK_BYTES, max_bytes)


def test_what_was_written_is_found_by_the_next_process(tmp_path: Path) -> None:
    file = _open(tmp_path / "kv")
    assert (file.num_slots, file.blocks()) == (4, [])
    for stamp, (slot, number) in enumerate([(2, 7), (0, 8), (3, 9)], start=1):
        file.write(slot, _key(number), stamp, _contents(number))
    file.write(0, _key(5), 9, _contents(5))
    file.close()
    again = _open(tmp_path / "kv")
    assert [(one.stamp, one.key, one.slot) for one in again.blocks()] == [
        (1, _key(7), 2),
        (3, _key(9), 3),
        (9, _key(5), 0),
    ]
    assert _read(again, 2, _key(7)) == b"".join(_contents(7))
    assert _read(again, 0, _key(8)) is None
    assert _read(again, 1, _key(7)) is None
    (made,) = (tmp_path / "kv").glob("*.kv")
    assert made.stat().st_mode & 0o77 == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 64 + BLOCK_BYTES - 1), st.integers(1, 255))
def test_a_block_of_which_a_byte_has_changed_is_none(
    tmp_path_factory: pytest.TempPathFactory, offset: int, change: int
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    file = _open(folder)
    file.write(1, _key(7), 1, _contents(7))
    file.close()
    (path,) = folder.glob("*.kv")
    data = bytearray(path.read_bytes()).ljust(4096 + 2 * SLOT_BYTES, b"\0")
    data[4096 + SLOT_BYTES + offset] ^= change
    path.write_bytes(data)
    again = _open(folder)
    header_bytes = 44
    if offset < header_bytes:
        assert again.blocks() == []
    read = _read(again, 1, _key(7))
    # Behind header and contents nothing counts.
    assert read == (b"".join(_contents(7)) if offset >= header_bytes + BLOCK_BYTES else None)
    again.close()


def test_a_file_that_ends_early_has_what_came_before(tmp_path: Path) -> None:
    file = _open(tmp_path)
    for slot in range(3):
        file.write(slot, _key(slot), slot, _contents(slot))
    file.close()
    (path,) = tmp_path.glob("*.kv")
    os.truncate(path, 4096 + 2 * SLOT_BYTES + 50)
    again = _open(tmp_path)
    assert [one.slot for one in again.blocks()] == [0, 1]
    assert _read(again, 2, _key(2)) is None


def test_each_process_has_a_file_and_takes_an_earlier_one_of_its_kind(tmp_path: Path) -> None:
    first, second = _open(tmp_path, "a"), _open(tmp_path, "a")
    first.write(0, _key(1), 1, _contents(1))
    other = _open(tmp_path, "b")
    assert (second.blocks(), other.blocks()) == ([], [])
    assert len(list(tmp_path.glob("*.kv"))) == 3
    for file in (first, second, other):
        file.close()
    again = _open(tmp_path, "a", 1 << 20)
    assert [one.key for one in again.blocks()] == [_key(1)]
    assert len(list(tmp_path.glob("*.kv"))) == 3


def test_processes_that_begin_at_the_same_moment_take_all_earlier_files(tmp_path: Path) -> None:
    earlier = [_open(tmp_path) for _ in range(4)]
    for number, file in enumerate(earlier):
        file.write(0, _key(number), 1, _contents(number))
        file.close()
    with ThreadPoolExecutor(4) as processes:
        again = list(processes.map(lambda _: _open(tmp_path), range(4)))
    assert {one.key for file in again for one in file.blocks()} == set(map(_key, range(4)))
    assert len(list(tmp_path.glob("*.kv"))) == 4


def test_files_of_others_make_room_when_they_are_too_many(tmp_path: Path) -> None:
    for number in range(3):
        file = _open(tmp_path, f"model {number}", 1 << 20)
        for slot in range(4):
            file.write(slot, _key(slot), slot, _contents(slot))
        file.close()
        os.utime(tmp_path / f"{number}.kv", ns=(number, number))
    # The first two go: one of the size of the third may stay.
    held = _open(tmp_path, "another", (tmp_path / "2.kv").stat().st_blocks * 512)
    assert sorted(path.name for path in tmp_path.glob("*.kv")) == ["2.kv", "3.kv"]
    held.close()


def test_too_small_size_and_unusable_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_cache_bytes is 4096, but one block takes 4096"):
        _open(tmp_path, max_bytes=4096)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"disk_cache_path: .* cannot be used"):
        _open(tmp_path / "file")
