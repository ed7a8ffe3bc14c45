"""The pipe through which the embedded engine writes an answer, and its reader takes it."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator

from millrace.telemetry.store.reading import TOO_MANY_QUERIES, QueryError

_CHUNK_BYTES = 256 * 1024
# An answer that is shorter has no part of it read before it is known that the query succeeded.
_FIRST_BYTES = 128 * 1024


class AnswerPipe:
    """Has the engine write into one end, by INTO OUTFILE in a thread, and be read at the other, by
    the event loop. The engine waits while the pipe is full."""

    def __init__(self) -> None:
        try:
            self._read_end, self._write_end = os.pipe()
        except OSError as error:
            raise QueryError.refusing(
                TOO_MANY_QUERIES, f"No file is left for the answer: {error.strerror}."
            ) from error
        os.set_blocking(self._read_end, False)
        fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, _CHUNK_BYTES)
        self.clause = f"INTO OUTFILE '/dev/fd/{self._write_end}' APPEND COMPRESSION 'none'"
        self.output_format = ""
        self.is_left = False
        self._wait: asyncio.Event | None = None

    async def chunks(self, call: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """The bytes, until the engine's ``call`` has ended. The first chunk may be empty; it comes
        when the answer is known to begin well. Raises what the call raised."""
        first = bytearray()
        while len(first) < _FIRST_BYTES:
            chunk = await self._read()
            if not chunk:
                await asyncio.shield(call)
                yield bytes(first)
                return
            first += chunk
        yield bytes(first)
        del first
        while chunk := await self._read():
            yield chunk
        await asyncio.shield(call)

    async def _read(self) -> bytes:
        loop = asyncio.get_running_loop()
        while not self.is_left:
            try:
                return os.read(self._read_end, _CHUNK_BYTES)
            except BlockingIOError:
                self._wait = asyncio.Event()
                loop.add_reader(self._read_end, self._wait.set)
                try:
                    await self._wait.wait()
                finally:
                    if not self.is_left:
                        loop.remove_reader(self._read_end)
        return b""

    def leave(self) -> None:
        """No more is read: the engine, which may wait, cannot write."""
        if self.is_left:
            return
        self.is_left = True
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._wait is not None:
            self._wait.set()

    def end(self) -> None:
        """The engine writes no more."""
        os.close(self._write_end)
