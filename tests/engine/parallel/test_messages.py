"""Messages of rank 0 to the ranks on other devices, and their transport."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cuda.inputs import NO_TABLES, ToldStep
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.kernels.stage_link import StageLink, link_memory
from millrace.engine.kv.cache import (
    CheckBlocks,
    CopyBlock,
    LoadBlocks,
    ReserveSlots,
    ScrubBlocks,
    StoreBlocks,
)
from millrace.engine.parallel.lead import LinkChannel, link_shape
from millrace.engine.parallel.messages import (
    Message,
    WantedRows,
)
from millrace.engine.parallel.messages import (
    SharedRows as WantedLogits,
)
from millrace.engine.parallel.messages import (
    decode_told as decode,
)
from millrace.engine.parallel.messages import (
    encode_told as encode,
)

BLOCKS = st.lists(st.integers(0, 1 << 20), max_size=9)


def sent(message: Message, *, behind: bytes = b"") -> Message:
    return decode(memoryview(bytearray(b"".join(encode(message)) + behind)))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    num_tables=st.integers(0, 5),
    num_adapters=st.none() | st.integers(0, 7),
    is_recorded=st.booleans(),
    keeps_states=st.booleans(),
    behind=st.binary(max_size=3),
)
def test_a_step_comes_as_it_was_told(
    sizes: list[int],
    num_tables: int,
    num_adapters: int | None,
    is_recorded: bool,
    keeps_states: bool,
    behind: bytes,
) -> None:
    shape = StepShape(*sizes)
    step = ToldStep(
        shape,
        np.arange(shape.num_packed) - 5,
        np.arange(2 * num_tables).reshape(2, num_tables),
        None if num_adapters is None else np.arange(num_adapters, dtype=np.int32),
        is_recorded,
        keeps_states,
    )
    came = sent(step, behind=behind)
    assert isinstance(came, ToldStep)
    assert (came.shape, *came[4:]) == (shape, is_recorded, keeps_states)
    for own, other in zip(step[1:4], came[1:4], strict=True):
        np.testing.assert_array_equal(own, other)
        assert other is None or other.flags.writeable, "torch takes no others"


@given(blocks=BLOCKS, slots=BLOCKS)
def test_other_messages_come_as_they_were_said(blocks: list[int], slots: list[int]) -> None:
    for message in (
        WantedLogits(len(blocks)),
        CopyBlock(1, 2),
        ScrubBlocks(blocks),
        CheckBlocks(blocks),
        ReserveSlots(len(slots)),
        StoreBlocks(blocks, slots),
        LoadBlocks(slots, blocks),
    ):
        assert sent(message, behind=b"\x00") == message


@given(rows=BLOCKS, makes_logits=st.booleans(), steps_back=st.integers(0, 1))
def test_rows_are_asked_for(rows: list[int], makes_logits: bool, steps_back: int) -> None:
    came = sent(WantedRows(np.array(rows, np.int64), makes_logits, steps_back), behind=b"\x00")
    assert isinstance(came, WantedRows)
    assert (came.rows.tolist(), *came[1:]) == (rows, makes_logits, steps_back)
    assert came.rows.flags.writeable, "torch takes no others"


def test_a_step_that_is_cut_off_is_not_read() -> None:
    shape = StepShape(2, 2, 2, 2)
    step = ToldStep(shape, np.zeros(shape.num_packed, np.int64), NO_TABLES, None, is_recorded=True)
    whole = bytearray(b"".join(encode(step)))
    for length in (0, 8, 64, len(whole) - 8):
        with pytest.raises(ValueError, match="buffer"):
            decode(memoryview(whole[:length]))


@pytest.fixture
def channels() -> list[LinkChannel]:
    """Return rank 0's channel, and the channels of two other ranks."""
    shape = link_shape(2)
    fd = link_memory(shape)
    try:
        return [
            LinkChannel(StageLink(cpu_library(), fd, shape, index=index, timeout_s=5.0))
            for index in (0, 0, 1)
        ]
    finally:
        os.close(fd)


def test_messages_come_in_their_order_however_long_they_are(channels: list[LinkChannel]) -> None:
    lead, *others = channels
    lengths = [0, 1, 1 << 20, (1 << 20) - 8, 5 << 20, 17, 12 << 20]
    messages = [os.urandom(64) * (length // 64) + os.urandom(length % 64) for length in lengths]

    def read(channel: LinkChannel) -> list[bytes]:
        return [bytes(channel.receive()) for _ in messages]

    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(read, other) for other in others]
        for message in messages:
            lead.post(message[:5], message[5:])
        for one in made:
            assert one.result() == messages


def test_waiting_rank_hears_that_the_group_has_ended(channels: list[LinkChannel]) -> None:
    lead, other, _ = channels
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.receive)
        lead.abort("rank 2 is gone")
        with pytest.raises(RanksFailedError):
            waiting.result()
    for _ in range(8):  # as many as there is room for
        lead.post(b"anything")
    with pytest.raises(RanksFailedError, match="rank 2 is gone"):
        lead.post(b"anything")
