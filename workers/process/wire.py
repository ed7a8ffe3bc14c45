"""Messages between the worker's bus side and its engine process, over a socket pair.

Messages are MessagePack with a 4-byte little-endian length in front. The bus side sends one
``Load``, then lists of commands. The engine answers ``Ready`` once. Then it sends one ``Stepped``
for one or several steps, and one after cancels, or ``Broken`` before it ends.
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
    """Command to load the checkpoint at ``path``.

    ``shared``: other processes use the machine too. Tokens in the middle of answers are gathered
    for ``gather_s`` before they are sent.
    """

    path: str
    config: EngineConfig
    shared: bool
    gather_s: float = 0.0


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Command to generate for a request."""

    request: EngineRequest


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Command to forget a request and free its resources."""

    request_id: str


class ResetPrefixes(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefixes"):
    """Command to empty the prefix cache, except for the blocks of live requests."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Report that the model is loaded and runs with ``config``.

    ``device_uuid`` is that of the (first) CUDA device, empty without one. KV blocks are served at
    ``transfer_endpoint``; None if they are not.
    """

    stats: EngineStats
    config: ResolvedEngineConfig
    device_uuid: str = ""
    transfer_endpoint: TransferEndpoint | None = None


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """Report of steps: outputs of all requests, the engine's stats, and changes of the prefix
    cache, if any.

    ``device_times`` are those of cancelled requests, of requests that owed device time, and now and
    then of all requests.
    """

    outputs: list[EngineOutput]
    stats: EngineStats
    prefixes: PrefixChanges | None = None
    device_times: list[DeviceTime] = []


class Broken(msgspec.Struct, frozen=True, array_like=True, tag="broken"):
    """Report that the engine ends, with the reason."""

    message: str


Command = Add | Stop | ResetPrefixes
Report = Ready | Stepped | Broken

_encoder = msgspec.msgpack.Encoder()
load_decoder = msgspec.msgpack.Decoder(Load)
commands_decoder = msgspec.msgpack.Decoder(list[Command])
report_decoder = msgspec.msgpack.Decoder(Report)


def pack(message: Load | list[Command] | Report) -> bytes:
    """Return the message with its length in front."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Unpacker:
    """Splitter of a byte stream into the payloads of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return every payload that ``data`` completes."""
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
