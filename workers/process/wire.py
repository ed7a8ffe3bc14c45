"""Messages between the worker's bus side and its engine process, over a socket pair.

Messages are MessagePack behind a 4-byte little-endian length. The bus side sends one ``Load``,
then lists of commands; the engine answers ``Ready`` once, then one ``Stepped`` for one step or
several, and one where requests were cancelled, or ``Broken`` before it ends.
"""

from __future__ import annotations

import struct

import msgspec

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.schemas.config import EngineConfig
from millrace.schemas.transfer import TransferEndpoint

_LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Load the checkpoint at ``path``; ``shared``: other processes use the machine too. Tokens in
    the middle of answers are gathered for ``gather_s`` before they are told."""

    path: str
    config: EngineConfig
    shared: bool
    gather_s: float = 0.0


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Generate for this request."""

    request: EngineRequest


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Forget a request and free what it holds."""

    request_id: str


class ResetPrefixes(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefixes"):
    """Empty the prefix cache but for the blocks of live requests."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded and runs by ``config``; ``device_uuid`` is that of the (first) CUDA
    device, empty without one. Blocks of its KV cache are served at ``transfer_endpoint``; None:
    they are not."""

    stats: EngineStats
    config: ResolvedEngineConfig
    device_uuid: str = ""
    transfer_endpoint: TransferEndpoint | None = None


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """What steps made for all requests, how the engine stands after them, and what has changed in
    its prefix cache, if anything. ``device_times`` are those of cancelled requests, of ones that
    owed something, and now and then of all."""

    outputs: list[EngineOutput]
    stats: EngineStats
    prefixes: PrefixChanges | None = None
    device_times: list[DeviceTime] = []


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """The engine ends, and why."""

    message: str


Command = Add | Stop | ResetPrefixes
Report = Ready | Stepped | Broken

_encoder = msgspec.msgpack.Encoder()
load_decoder = msgspec.msgpack.Decoder(Load)
commands_decoder = msgspec.msgpack.Decoder(list[Command])
report_decoder = msgspec.msgpack.Decoder(Report)


def pack(message: Load | list[Command] | Report) -> bytes:
    """The message with its length before it."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Unpacker:
    """Cuts a byte stream into the payloads of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Every payload that ``data`` makes whole."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads
