"""Messages of rank 0 to the other ranks, and of a stage of CPUs to the next one.

A message is a header of 64-bit numbers, the kind first, followed by the arrays that the header
describes. Of a request it holds only the tokens that the step computes. Ranks on CPUs read messages
by ``decode``. Ranks with a device read rank 0's messages by ``decode_told``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.devices.cuda.device import Array
from millrace.engine.devices.cuda.inputs import ToldStep
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.kv.cache import CacheCommand
from millrace.engine.step.batch import FlatBatch, QueryRange

_STEP, _LOGITS, _STAGE, _CACHE = 1, 2, 3, 4
_HEADER = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[CacheCommand] = msgspec.msgpack.Decoder(CacheCommand)


class WantedLogits(NamedTuple):
    """Request for the logits of rows [num_rows, hidden_size]."""

    rows: torch.Tensor


class StageStep(NamedTuple):
    """Step as it comes from the previous stage.

    ``hidden`` [num_tokens, hidden_size] is the input of the next layers. The last stage returns the
    logits of the rows ``wanted`` (int64), and with ``wants_states`` all states after the final
    norm. ``adapter_ids`` are the numbers of ``batch.adapters``.
    """

    batch: FlatBatch
    adapter_ids: list[int]
    hidden: torch.Tensor
    wanted: torch.Tensor
    wants_states: bool


class PartCommand(NamedTuple):
    """Command for the parts of the KV cache on other hosts; answers carry its ``number``."""

    number: int
    command: CacheCommand


def encode_command(told: PartCommand) -> list[bytes | memoryview]:
    """Encode a command for the next stage, which passes it on."""
    body = _encoder.encode(told.command)
    return [_header(_CACHE, told.number, len(body)), body]


def encode_stage(step: StageStep) -> list[memoryview]:
    """Encode a step for the next stage."""
    rows, wanted = step.hidden, step.wanted
    dtype = _DTYPES.index(rows.dtype)
    parts = [
        _header(_STAGE, rows.shape[1], dtype, len(wanted), step.wants_states),
        *encode_step(step.batch, step.adapter_ids),
        bytes_of(rows),
    ]
    if len(wanted):
        parts.append(wanted.numpy().data.cast("B"))
    return parts


def encode_step(batch: FlatBatch, adapter_ids: list[int]) -> list[memoryview]:
    """Encode a batch for a rank; ``adapter_ids`` are the numbers of ``batch.adapters``."""
    tables = array("i")
    ranges = array("q")
    for start, num_tokens, num_context_tokens, table in batch.ranges:
        ranges.extend((start, num_tokens, num_context_tokens, len(table)))
        tables.extend(table)
    num_tokens = len(batch.token_ids)
    numbers = (num_tokens, len(batch.ranges), batch.num_single, len(adapter_ids), len(tables))
    parts = [
        _header(_STEP, *numbers),
        batch.token_ids.numpy().data,
        batch.positions.numpy().data,
        memoryview(ranges),
        memoryview(array("q", adapter_ids)),
    ]
    if batch.adapters is not None:
        parts.append(batch.adapters.of_rows.numpy().data)
    parts.append(memoryview(tables))
    return [part.cast("B") for part in parts if len(part)]


def encode_logits(rows: torch.Tensor) -> list[memoryview]:
    """Encode a request for the logits of contiguous ``rows`` [num_rows, hidden_size]."""
    num_rows, width = rows.shape
    return [_header(_LOGITS, num_rows, width, _DTYPES.index(rows.dtype)), bytes_of(rows)]


def decode(
    message: memoryview, adapter: Callable[[int], AdapterWeights]
) -> FlatBatch | WantedLogits | StageStep | PartCommand:
    """Decode a message; ``adapter`` returns the adapter of a number."""
    reader = _Reader(message)
    kind, *numbers = reader.numbers(_HEADER).tolist()
    if kind == _LOGITS:
        num_rows, width, dtype = numbers[:3]
        return WantedLogits(reader.rows(num_rows, width, _DTYPES[dtype]))
    if kind == _CACHE:
        return PartCommand(numbers[0], _command_decoder.decode(reader.bytes(numbers[1])))
    if kind == _STAGE:
        width, dtype, num_wanted, wants_states = numbers[:4]
        batch, adapter_ids = _step(reader, reader.numbers(_HEADER).tolist()[1:], adapter)
        hidden = reader.rows(len(batch.token_ids), width, _DTYPES[dtype])
        wanted = torch.from_numpy(reader.numbers(num_wanted))
        return StageStep(batch, adapter_ids, hidden, wanted, bool(wants_states))
    return _step(reader, numbers, adapter)[0]


def _step(
    reader: _Reader, numbers: list[int], adapter: Callable[[int], AdapterWeights]
) -> tuple[FlatBatch, list[int]]:
    """Decode a step and the numbers of its adapters."""
    num_tokens, num_ranges, num_single, num_adapters, num_blocks = numbers[:5]
    token_ids = torch.from_numpy(reader.numbers(num_tokens))
    positions = torch.from_numpy(reader.numbers(num_tokens))
    spans = reader.numbers(4 * num_ranges).reshape(-1, 4).tolist()
    adapter_ids = reader.numbers(num_adapters).tolist()
    adapters = None
    if adapter_ids:
        of_rows = torch.from_numpy(reader.small_numbers(num_tokens))
        adapters = RowAdapters([adapter(number) for number in adapter_ids], of_rows)
    tables = array("i")
    tables.frombytes(reader.small_numbers(num_blocks).tobytes())
    ranges: list[QueryRange] = []
    begin = 0
    for start, num_own, num_context_tokens, length in spans:
        table = tables[begin : begin + length]
        ranges.append(QueryRange(start, num_own, num_context_tokens, table))
        begin += length
    batch = FlatBatch(
        token_ids=token_ids,
        positions=positions,
        ranges=ranges,
        num_single=num_single,
        sampled_rows=torch.empty(0, dtype=torch.int64),
        sampled=[],
        pooled=[],
        scored=[],
        adapters=adapters,
    )
    return batch, adapter_ids


def _header(*numbers: int) -> memoryview:
    """Encode the kind and numbers of a message, padded to a fixed size."""
    return memoryview(array("q", (*numbers, *[0] * (_HEADER - len(numbers))))).cast("B")


def bytes_of(rows: torch.Tensor) -> memoryview:
    """Return the bytes of contiguous rows."""
    return rows.view(torch.uint8).numpy().data.cast("B")


class _Reader:
    """Reader of consecutive arrays of a message, which it copies."""

    def __init__(self, message: memoryview) -> None:
        self._message = message
        self._at = 0

    def numbers(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.frombuffer(self._take(8 * count), dtype=np.int64)

    def small_numbers(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(self._take(4 * count), dtype=np.int32)

    def bytes(self, count: int) -> bytearray:
        return self._take(count)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        taken = self._take(num_rows * width * dtype.itemsize)
        return torch.frombuffer(taken, dtype=dtype).view(num_rows, width)

    def _take(self, num_bytes: int) -> bytearray:
        taken = bytearray(self._message[self._at : self._at + num_bytes])
        if len(taken) < num_bytes:
            raise ValueError("a message to the ranks is shorter than it says")
        self._at += num_bytes
        return taken


_TOLD, _SHARED, _ROWS = 5, 6, 7
_HEADER_BYTES = 8 * _HEADER
_NO_ADAPTERS = -1
# Flags of a step.
_IS_RECORDED, _KEEPS_STATES = 1, 2


class SharedRows(NamedTuple):
    """Request for the logits of ``num_rows`` rows, which rank 0 shares next."""

    num_rows: int


class WantedRows(NamedTuple):
    """Request to the last stage for rows of a step that keeps its states.

    It returns the logits of ``rows`` (int64), or the rows themselves after the final norm.
    ``steps_back`` counts the steps with kept states that were announced since.
    """

    rows: Array
    makes_logits: bool
    steps_back: int


Message = ToldStep | SharedRows | WantedRows | CacheCommand


def encode_told(message: Message) -> list[bytes | memoryview]:
    """Encode the parts of a message."""
    if isinstance(message, ToldStep):
        shape, packed, tables, adapters, is_recorded, keeps_states = message
        num_adapters = _NO_ADAPTERS if adapters is None else len(adapters)
        flags = _IS_RECORDED * is_recorded | _KEEPS_STATES * keeps_states
        header = _header(_TOLD, *shape, flags, tables.shape[1], num_adapters)
        arrays = [packed, tables, *([] if adapters is None else [adapters])]
        return [header, *(part.data.cast("B") for part in arrays if part.size)]
    if isinstance(message, SharedRows):
        return [_header(_SHARED, message.num_rows)]
    if isinstance(message, WantedRows):
        rows, makes_logits, steps_back = message
        return [_header(_ROWS, len(rows), makes_logits, steps_back), rows.data.cast("B")]
    return encode_command(PartCommand(0, message))


def decode_told(message: memoryview) -> Message:
    """Decode a message; its arrays are views of ``message``.

    Raises ValueError if it is shorter than its header says.
    """
    kind, *numbers = np.frombuffer(message, np.int64, _HEADER).tolist()
    rest = message[_HEADER_BYTES:]
    if kind == _SHARED:
        return SharedRows(numbers[0])
    if kind == _CACHE:
        return _command_decoder.decode(rest[: numbers[1]])
    if kind == _ROWS:
        rows: Array = np.frombuffer(rest, np.int64, numbers[0])
        return WantedRows(rows, bool(numbers[1]), numbers[2])
    *sizes, flags, num_tables, num_adapters = numbers
    shape = StepShape(*sizes)
    packed: Array = np.frombuffer(rest, np.int64, shape.num_packed)
    rest = rest[packed.nbytes :]
    tables: Array = np.frombuffer(rest, np.int64, 2 * num_tables).reshape(2, num_tables)
    adapters: Array | None = None
    if num_adapters != _NO_ADAPTERS:
        adapters = np.frombuffer(rest[tables.nbytes :], np.int32, num_adapters)
    is_recorded, keeps_states = bool(flags & _IS_RECORDED), bool(flags & _KEEPS_STATES)
    return ToldStep(shape, packed, tables, adapters, is_recorded, keeps_states)
