"""Format of messages from rank 0: the other ranks read what rank 0 wrote."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.adapters.rows import PlainAdapter, RowAdapters
from millrace.engine.kv.cache import CheckBlocks, ScrubBlocks
from millrace.engine.parallel.messages import (
    PartCommand,
    StageStep,
    WantedLogits,
    decode,
    encode_command,
    encode_logits,
    encode_stage,
    encode_step,
)
from millrace.engine.step.batch import FlatBatch, QueryRange

ADAPTERS = {number: PlainAdapter([]) for number in (3, 9)}


@st.composite
def batches(draw: st.DrawFn) -> tuple[FlatBatch, list[int]]:
    """Draw batches as layouts make them, single tokens first, and the numbers of their adapters."""
    num_single, chunks = draw(st.integers(0, 4)), draw(st.lists(st.integers(2, 30), max_size=3))
    lengths = [1] * num_single + chunks
    if not lengths:
        lengths = [1]
        num_single = 1
    ranges: list[QueryRange] = []
    start = 0
    for length in lengths:
        table = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
        ranges.append(QueryRange(start, length, draw(st.integers(0, 10**6)), table))
        start += length
    numbers = draw(st.lists(st.sampled_from(list(ADAPTERS)), unique=True))
    of_rows = draw(st.lists(st.integers(-1, len(numbers) - 1), min_size=start, max_size=start))
    batch = FlatBatch(
        token_ids=torch.tensor(draw(_numbers(start))),
        positions=torch.tensor(draw(_numbers(start))),
        ranges=ranges,
        num_single=num_single,
        sampled_rows=torch.empty(0, dtype=torch.int64),
        sampled=[],
        pooled=[],
        scored=[],
        adapters=RowAdapters(
            [ADAPTERS[number] for number in numbers], torch.tensor(of_rows, dtype=torch.int32)
        )
        if numbers
        else None,
    )
    return batch, numbers


def _numbers(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2**40), min_size=count, max_size=count)


def _message(parts: list[memoryview]) -> memoryview:
    return memoryview(b"".join(parts) + b"what was said before")


@given(batches())
def test_a_step(made: tuple[FlatBatch, list[int]]) -> None:
    batch, numbers = made
    heard = decode(_message(encode_step(batch, numbers)), ADAPTERS.__getitem__)
    assert isinstance(heard, FlatBatch)
    assert torch.equal(heard.token_ids, batch.token_ids)
    assert torch.equal(heard.positions, batch.positions)
    assert heard.num_single == batch.num_single
    assert [(*one[:3], list(one.block_table)) for one in heard.ranges] == [
        (*one[:3], list(one.block_table)) for one in batch.ranges
    ]
    if batch.adapters is None:
        assert heard.adapters is None
    else:
        assert heard.adapters is not None
        assert [id(one) for one in heard.adapters.weights] == [
            id(one) for one in batch.adapters.weights
        ]
        assert torch.equal(heard.adapters.of_rows, batch.adapters.of_rows)


@given(batches(), st.integers(0, 5), st.booleans())
def test_a_step_for_the_next_stage(
    made: tuple[FlatBatch, list[int]], num_wanted: int, wants_states: bool
) -> None:
    batch, numbers = made
    hidden = torch.randn(len(batch.token_ids), 6).bfloat16()
    wanted = torch.arange(num_wanted)
    sent = StageStep(batch, numbers, hidden, wanted, wants_states)
    heard = decode(_message(encode_stage(sent)), ADAPTERS.__getitem__)
    assert isinstance(heard, StageStep)
    assert torch.equal(heard.batch.token_ids, batch.token_ids)
    assert heard.adapter_ids == numbers
    assert torch.equal(heard.hidden, hidden)
    assert torch.equal(heard.wanted, wanted)
    assert heard.wants_states is wants_states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_whose_logits_are_wanted(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 7).to(dtype)
    heard = decode(_message(encode_logits(rows)), ADAPTERS.__getitem__)
    assert isinstance(heard, WantedLogits)
    assert torch.equal(heard.rows, rows)


def test_half_a_message_is_refused() -> None:
    whole = b"".join(encode_logits(torch.zeros(3, 7)))
    with pytest.raises(ValueError, match="shorter than it says"):
        decode(memoryview(whole)[:-1], ADAPTERS.__getitem__)


@given(
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**31 - 1)),
    st.sampled_from([CheckBlocks, ScrubBlocks]),
    st.integers(0, 100),
)
def test_a_command_is_heard_as_it_was_told(
    number: int, blocks: list[int], kind: type[CheckBlocks | ScrubBlocks], behind: int
) -> None:
    command = PartCommand(number, kind(blocks))
    message = b"".join(encode_command(command)) + bytes(behind)
    assert decode(memoryview(message), ADAPTERS.__getitem__) == command
