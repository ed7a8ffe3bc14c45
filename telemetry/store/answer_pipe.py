"""Pipe from the embedded engine, which writes an answer, to the reader of the answer."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator

from millrace.telemetry.store.reading import TOO_MANY_QUERIES, QueryError

_CHUNK_BYTES = 256 * 1024
# A shorter answer is held back until the query has succeeded.
_FIRST_BYTES = 128 * 1024


class AnswerPipe:
    """Pipe whose one end the engine writes, by INTO OUTFILE in a thread, and whose other end the
    event loop reads. The engine waits while the pipe is full."""

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
        """Yield the bytes until the engine's ``call`` has ended.

        The first chunk may be empty; it comes when the answer is known to begin well. Raises the
        call's error.
        """
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

    def write(self, data: bytes) -> None:
        """Write bytes that the engine does not write itself, in a thread."""
        view = memoryview(data)
        while view and not self.is_left:
            view = view[os.write(self._write_end, view) :]

    def leave(self) -> None:
        """Close the reading end, so that a waiting engine cannot write."""
        if self.is_left:
            return
        self.is_left = True
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        if self._wait is not None:
            self._wait.set()

    def end(self) -> None:
        """Close the writing end."""
        os.close(self._write_end)
