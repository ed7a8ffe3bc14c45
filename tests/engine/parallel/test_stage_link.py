"""Messages between stages: the ends are threads here, as they wait without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.rank_view import MAX_RANKS, RanksFailedError
from millrace.engine.kernels.stage_link import LinkShape, StageLink, link_memory

TIMEOUT_S = 30.0
PART_BYTES = 256


def ends(shape: LinkShape, timeout_s: float = TIMEOUT_S) -> tuple[list[StageLink], list[StageLink]]:
    """Return the links of the writers and of the readers."""
    fd = link_memory(shape)

    def make(index: int) -> StageLink:
        return StageLink(cpu_library(), fd, shape, index=index, timeout_s=timeout_s)

    try:
        writers = [make(index) for index in range(shape.num_writers)]
        return writers, [make(index) for index in range(shape.num_readers)]
    finally:
        os.close(fd)


@settings(max_examples=25, deadline=None)
@given(
    num_writers=st.integers(1, 3),
    num_readers=st.integers(1, 3),
    num_slots=st.integers(1, 3),
    messages=st.lists(st.binary(min_size=1, max_size=PART_BYTES), min_size=1, max_size=12),
)
def test_all_readers_have_all_messages_in_order(
    num_writers: int, num_readers: int, num_slots: int, messages: list[bytes]
) -> None:
    writers, readers = ends(LinkShape(num_writers, num_readers, num_slots, PART_BYTES))

    def write(writer: StageLink) -> None:
        for number, message in enumerate(messages):
            writer.write(number, message[:1], message[1:])

    def read(reader: StageLink) -> list[list[bytes]]:
        read: list[list[bytes]] = []
        for number in range(len(messages)):
            reader.wait_written(number, bound=True)
            parts = [reader.part(number, writer) for writer in range(num_writers)]
            read.append([bytes(part) for part in parts])
            reader.done(number)
        return read

    with ThreadPoolExecutor(num_writers + num_readers) as pool:
        written = [pool.submit(write, writer) for writer in writers]
        heard = [pool.submit(read, reader) for reader in readers]
        assert all(one.result() is None for one in written)
        for one in heard:
            assert one.result() == [[message] * num_writers for message in messages]


def test_a_slot_is_not_written_to_before_it_was_read() -> None:
    [writer], [reader] = ends(LinkShape(1, 1, 2, PART_BYTES), timeout_s=0.2)
    writer.write(0, b"first")
    writer.write(1, b"second")
    with pytest.raises(RanksFailedError, match="did not come in time"):
        writer.write(2, b"third")
    assert bytes(reader.part(0)) == b"first"


def test_unread_message_is_dropped_with_a_later_one() -> None:
    [writer], [reader] = ends(LinkShape(1, 1, 2, PART_BYTES))
    writer.write(0, b"first")
    writer.write(1, b"second")
    reader.done(1)
    writer.write(2, b"third")
    assert bytes(reader.part(2)) == b"third"


def _read(_: StageLink, reader: StageLink) -> None:
    reader.wait_written(0, bound=False)


def _write(writer: StageLink, _: StageLink) -> None:
    for number in range(2):
        writer.write(number, b"!")


@pytest.mark.parametrize(("wait", "waiting"), [(_read, 1), (_write, 0)], ids=["reads", "writes"])
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "other"])
def test_waiter_learns_that_the_link_has_ended(
    wait: Callable[[StageLink, StageLink], None], waiting: int, is_own: bool
) -> None:
    """A waiter at the aborted end learns the reason; one in another process learns only of the
    end."""
    [writer], [reader] = ends(LinkShape(1, 1, 1, PART_BYTES))
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(wait, writer, reader)
        ended = waiting if is_own else 1 - waiting
        (writer, reader)[ended].abort("rank 1 is gone")
        failure = waited.exception(TIMEOUT_S)
    assert isinstance(failure, RanksFailedError)
    assert str(failure) == ("rank 1 is gone" if is_own else "it was ended")


@pytest.mark.parametrize("part_bytes", [1, 63, 64, 65])
def test_parts_of_any_size_do_not_overlap(part_bytes: int) -> None:
    writers, [reader] = ends(LinkShape(2, 1, 2, part_bytes))
    for number in range(2):
        for index, writer in enumerate(writers):
            writer.write(number, bytes([2 * number + index]) * part_bytes)
    parts = [bytes(reader.part(number, writer)) for number in range(2) for writer in range(2)]
    assert parts == [bytes([number]) * part_bytes for number in range(4)]


def test_message_without_room_is_refused() -> None:
    [writer], _ = ends(LinkShape(1, 1, 1, PART_BYTES))
    with pytest.raises(ValueError, match="257 bytes is too long"):
        writer.write(0, bytes(PART_BYTES), b"!")
    with pytest.raises(ValueError, match=f"{MAX_RANKS} processes at most, not {MAX_RANKS + 1}"):
        link_memory(LinkShape(1, MAX_RANKS, 1, PART_BYTES))
