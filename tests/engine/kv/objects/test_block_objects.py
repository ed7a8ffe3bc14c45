"""Objects have exactly the blocks that were written under their keys, in a store of any kind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore, ObjectStore

from millrace.engine.kv.objects.block_objects import (
    BlockObjects,
    NoObjectError,
    ObjectPlace,
    ObjectStoreError,
    open_store,
)
from millrace.schemas.prefix import extend_keys, root_key
from tests.engine.kv.objects.conftest import TIMEOUT_S, StoreUnderTest
from tests.engine.kv.objects.faulty_s3 import FaultyS3

_BLOCK_BYTES = 100
_RUN = 4


def _objects(store: ObjectStore, identity: str = "weights") -> BlockObjects:
    return BlockObjects(store, store, identity, _BLOCK_BYTES, _RUN * _BLOCK_BYTES)


def _keys(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Return the keys of blocks of one token."""
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt), tokens, num_blocks=len(tokens), block_size_tokens=1)
    return keys


def _contents(key: bytes) -> bytes:
    return random.Random(key).randbytes(_BLOCK_BYTES)


def _pieces(contents: bytes) -> list[memoryview]:
    """Split a block's contents into pieces of two layers that differ in size."""
    whole = memoryview(bytearray(contents))
    return [whole[:30], whole[30:]]


def _write(objects: BlockObjects, keys: list[bytes]) -> None:
    objects.write(keys, [_pieces(_contents(key)) for key in keys])


def _read(objects: BlockObjects, run: list[bytes], numbers: Sequence[int]) -> list[bytes]:
    """Read the blocks with these numbers and return the contents of the good ones."""
    places = [ObjectPlace(number, run[number], _pieces(bytes(_BLOCK_BYTES))) for number in numbers]
    num_good = objects.read(run[-1], places)
    return [b"".join(place.pieces) for place in places[:num_good]]


class TestAnyStore:
    def test_what_was_written_is_read_whole_and_in_part(self, stored: StoreUnderTest) -> None:
        objects, run = _objects(stored.store), _keys(range(_RUN))
        assert not objects.has(run[-1])
        _write(objects, run)
        assert objects.has(run[-1])
        for numbers in ([0, 1, 2, 3], [0], [2, 3], [1, 3]):
            assert _read(objects, run, numbers) == [_contents(run[n]) for n in numbers]

    def test_unwritten_object_is_absent(self, stored: StoreUnderTest) -> None:
        objects, run = _objects(stored.store), _keys(range(_RUN))
        with pytest.raises(NoObjectError):
            _read(objects, run, [0])
        _write(objects, run)
        for other in (_keys([0, 1, 2, 9]), _keys(range(_RUN), "acme")):
            assert not objects.has(other[-1])
        assert not _objects(stored.store, "other weights").has(run[-1])

    @pytest.mark.parametrize("block", [0, 2, 3])
    def test_a_changed_byte_spoils_its_block_and_no_other(
        self, stored: StoreUnderTest, block: int
    ) -> None:
        objects, run = _objects(stored.store), _keys(range(_RUN))
        _write(objects, run)
        name = objects.name_of(run[-1])
        contents = bytearray(memoryview(obstore.get(stored.store, name).bytes()))
        contents[block * objects.object_bytes // _RUN + 50] ^= 1
        obstore.put(stored.store, name, bytes(contents))
        assert _read(objects, run, range(_RUN)) == [_contents(key) for key in run[:block]]
        if block < 3:
            assert _read(objects, run, [3]) == [_contents(run[3])]

    @pytest.mark.parametrize(("kept", "num_good"), [(0.1, 0), (0.6, 2), (0.99, 3)])
    def test_a_truncated_object_has_its_beginning(
        self, stored: StoreUnderTest, kept: float, num_good: int
    ) -> None:
        objects, run = _objects(stored.store), _keys(range(_RUN))
        _write(objects, run)
        name = objects.name_of(run[-1])
        contents = bytes(memoryview(obstore.get(stored.store, name).bytes()))
        obstore.put(stored.store, name, contents[: int(kept * len(contents))])
        assert not objects.has(run[-1])  # so that it is written anew
        assert _read(objects, run, range(_RUN)) == [_contents(key) for key in run[:num_good]]
        if num_good == 0:
            with pytest.raises(ObjectStoreError):
                _read(objects, run, [3])

    def test_an_object_under_another_s_name_is_not_taken(self, stored: StoreUnderTest) -> None:
        objects, run, other = _objects(stored.store), _keys(range(_RUN)), _keys([0, 1, 2, 9])
        _write(objects, run)
        obstore.copy(stored.store, objects.name_of(run[-1]), objects.name_of(other[-1]))
        # What both begin with is the same.
        assert _read(objects, other, range(_RUN)) == [_contents(key) for key in run[:3]]
        assert _read(objects, other, [3]) == []


def test_a_bucket_that_does_not_exist_is_a_failure(
    faulty: FaultyS3,
) -> None:
    store = open_store("s3://no-such-bucket/path", TIMEOUT_S)
    objects, run = _objects(store), _keys(range(_RUN))
    with pytest.raises(ObjectStoreError, match="no such bucket"):
        _read(objects, run, [0])
    with pytest.raises(ObjectStoreError):
        _write(objects, run)


def test_a_name_tells_nothing_of_key_or_identity() -> None:
    objects, run = _objects(MemoryStore()), _keys(range(_RUN))
    name = objects.name_of(run[-1])
    assert set(name) <= set("0123456789abcdef/")
    assert run[-1].hex()[:8] not in name.replace("/", "")
    assert "weights" not in name


@pytest.mark.parametrize(
    ("block_bytes", "num_blocks"), [(6144, 16), (384 << 10, 10), (2 << 20, 2), (5 << 20, 1)]
)
def test_an_object_has_a_few_mib(block_bytes: int, num_blocks: int) -> None:
    assert BlockObjects(MemoryStore(), MemoryStore(), "x", block_bytes).num_blocks == num_blocks


# Few tokens, so that prefixes part in the middle of runs and at their ends.
_PREFIXES = st.lists(
    st.tuples(st.sampled_from(["", "acme"]), st.lists(st.integers(0, 1), max_size=13)), max_size=12
)


@given(written=_PREFIXES, read=_PREFIXES)
@settings(max_examples=60, deadline=None)
def test_found_blocks_were_stored_under_these_keys(
    written: list[tuple[str, list[int]]], read: list[tuple[str, list[int]]]
) -> None:
    objects = _objects(MemoryStore())
    runs = [
        (is_written, keys[at : at + _RUN])
        for is_written, prefixes in ((True, written), (False, read))
        for salt, tokens in prefixes
        for keys in [_keys(tokens, salt)]
        for at in range(0, len(keys) - _RUN + 1, _RUN)
    ]
    stored: set[tuple[bytes, ...]] = set()
    for is_written, run in runs:
        if is_written:
            _write(objects, run)
            stored.add(tuple(run))
    for _, run in runs:
        assert objects.has(run[-1]) == (tuple(run) in stored)
        if tuple(run) in stored:
            for first in range(_RUN):
                found = _read(objects, run, range(first, _RUN))
                assert found == [_contents(key) for key in run[first:]]
        else:
            with pytest.raises(NoObjectError):
                _read(objects, run, range(_RUN))
