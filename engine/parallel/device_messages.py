"""What rank 0 says to the others, in the order in which it tells its own device.

A message is a header of 64-bit numbers, what it is first, and behind it what it names. Nothing of a
request is in it but the tokens that the step computes.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec
import numpy as np

from millrace.engine.devices.cuda.device import Array
from millrace.engine.devices.cuda.steps import ToldStep
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.kv.cache_commands import CacheCommand

_STEP, _LOGITS, _CACHE, _ROWS = 1, 2, 3, 4
_HEADER = 8
_HEADER_BYTES = 8 * _HEADER
_NO_ADAPTERS = -1
# What is said of a step by one number.
_IS_RECORDED, _KEEPS_STATES = 1, 2

_encoder = msgspec.msgpack.Encoder()
_cache_decoder: msgspec.msgpack.Decoder[CacheCommand] = msgspec.msgpack.Decoder(CacheCommand)


class WantedLogits(NamedTuple):
    """The logits of so many rows, which rank 0 shares, are wanted."""

    num_rows: int


class WantedRows(NamedTuple):
    """Of a step that keeps its states, the logits of some ``rows`` (int64), or the rows themselves
    behind the final norm, are wanted from the last stage. ``steps_back``: how many such steps were
    told of since."""

    rows: Array
    makes_logits: bool
    steps_back: int


Message = ToldStep | WantedLogits | WantedRows | CacheCommand


def encode(message: Message) -> list[bytes | memoryview]:
    """The parts of a message."""
    if isinstance(message, ToldStep):
        shape, packed, tables, adapters, is_recorded, keeps_states = message
        num_adapters = _NO_ADAPTERS if adapters is None else len(adapters)
        flags = _IS_RECORDED * is_recorded | _KEEPS_STATES * keeps_states
        numbers = [_STEP, *shape, flags, tables.shape[1], num_adapters]
        arrays = [packed, tables, *([] if adapters is None else [adapters])]
        return [_header(numbers), *(part.data.cast("B") for part in arrays if part.size)]
    if isinstance(message, WantedLogits):
        return [_header([_LOGITS, message.num_rows])]
    if isinstance(message, WantedRows):
        rows, makes_logits, steps_back = message
        return [_header([_ROWS, len(rows), makes_logits, steps_back]), rows.data.cast("B")]
    command = _encoder.encode(message)
    return [_header([_CACHE, len(command)]), command]


def _header(numbers: list[int]) -> memoryview:
    return memoryview(array("q", numbers + [0] * (_HEADER - len(numbers)))).cast("B")


def decode(message: memoryview) -> Message:
    """What a message says; arrays are those of ``message``. Raises ValueError for one that is
    shorter than it says."""
    kind, *numbers = np.frombuffer(message, np.int64, _HEADER).tolist()
    rest = message[_HEADER_BYTES:]
    if kind == _LOGITS:
        return WantedLogits(numbers[0])
    if kind == _CACHE:
        return _cache_decoder.decode(rest[: numbers[0]])
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
