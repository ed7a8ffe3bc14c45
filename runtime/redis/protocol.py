"""Redis's serialization protocol, RESP2: commands to bytes, and bytes to replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Argument = str | bytes | int | float
_LINE_END = b"\r\n"
_STATUS, _ERROR, _INTEGER, _BULK, _ARRAY = b"+-:$*"


class MalformedReplyError(Exception):
    """What came is not of the protocol: whose reply is whose is not known any more."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a server says of a command that it did not do, its code first."""

    text: str


Reply: TypeAlias = bytes | int | list["Reply"] | ErrorReply | None


def pack(command: Sequence[Argument]) -> bytes:
    """A command as the server reads it: an array of bulk strings. Raises UnicodeEncodeError for a
    string that is no text."""
    pieces = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(pieces)


class ReplyReader:
    """Reads replies out of a stream of bytes that comes in pieces of any size.

    Nothing is read twice but the part of an element that was there at the end of a piece, and of a
    long string not even that.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_needed = 0
        # Arrays that miss elements, the outermost first, each with the length that it will have.
        self._open: list[tuple[list[Reply], int]] = []

    def feed(self, piece: bytes) -> list[Reply]:
        """The replies that are whole with this piece. Raises MalformedReplyError."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes < self._num_needed:
            return []
        data = piece if len(self._pieces) == 1 else b"".join(self._pieces)
        replies: list[Reply] = []
        try:
            num_read = self._read(data, replies)
        except ValueError as error:
            raise MalformedReplyError(str(error)) from error
        rest = data[num_read:]
        self._pieces = [rest] if rest else []
        self._num_bytes = len(rest)
        return replies

    def _read(self, data: bytes, replies: list[Reply]) -> int:
        """How much of ``data`` was read; what was whole is added to ``replies``."""
        self._num_needed = at = 0
        reply: Reply
        while (end := data.find(_LINE_END, at)) >= 0:
            kind, after = data[at], end + 2
            if kind == _BULK:
                size = int(data[at + 1 : end])
                reply = None
                if size >= 0:
                    stop = after + size
                    if stop + 2 > len(data):
                        self._num_needed = stop + 2 - at
                        break
                    reply = data[after:stop]
                    after = stop + 2
            elif kind == _INTEGER:
                reply = int(data[at + 1 : end])
            elif kind == _ARRAY:
                size = int(data[at + 1 : end])
                if size > 0:
                    self._open.append(([], size))
                    at = after
                    continue
                reply = [] if size == 0 else None
            elif kind == _STATUS:
                reply = data[at + 1 : end]
            elif kind == _ERROR:
                reply = ErrorReply(data[at + 1 : end].decode(errors="replace"))
            else:
                raise MalformedReplyError(f"no reply begins with byte {kind}")
            at = after
            self._add(reply, replies)
        return at

    def _add(self, reply: Reply, replies: list[Reply]) -> None:
        """Add what is whole to the innermost open array, which may be whole with it."""
        while self._open:
            elements, size = self._open[-1]
            elements.append(reply)
            if len(elements) < size:
                return
            self._open.pop()
            reply = elements
        replies.append(reply)
