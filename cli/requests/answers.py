"""Output of asynchronous jobs' answers on the terminal, streamed or stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from millrace.bus.frame_reader import Outcome, StreamReader
from millrace.schemas.control import Replay, ResumePoint
from millrace.schemas.errors import MillraceError

if TYPE_CHECKING:
    from millrace.bus.api import Bus
    from millrace.schemas.frames import Frame
    from millrace.schemas.jobs import Job, JobResult

_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 0.5
_REPLAY_TIMEOUT_S = 1.0
_REPLAY_INTERVAL_S = 0.2


class StreamPrinter:
    """Writer of one request's text as its frames come, each token once.

    ``gap`` is set while tokens are missing; later tokens are held back until they come.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._reader = StreamReader()
        self._text = ""
        self.gap = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def worker_id(self) -> str:
        """Id of the worker that runs the request; "" before it started."""
        started = self._reader.started
        return started.worker_id if started is not None else ""

    @property
    def next_index(self) -> int:
        """Index of the first missing token."""
        return self._reader.next_index

    def on_frame(self, _request_id: str, frame: Frame) -> None:
        """Take a frame; callback of the subscription."""
        outcome = self._reader.feed(frame)
        if outcome is Outcome.GAP:
            self.gap.set()
        elif outcome is Outcome.TOKENS and not self._reader.waits_for_missing:
            self.gap.clear()
        elif outcome is Outcome.END:
            self.gap.clear()
            self.ended.set()
        if self._reader.has_pending:
            self._show(self._reader.take().text)

    def resume_point(self, _request_id: str) -> ResumePoint:
        """Return the tokens written so far, for a worker that continues the request."""
        return ResumePoint(token_ids=tuple(self._reader.token_ids))

    def show_rest(self, text: str) -> None:
        """Write the part of the whole ``text`` that is not written yet."""
        if text.startswith(self._text):
            self._show(text[len(self._text) :])
        else:
            self._show(f"\n{text}")

    def _show(self, text: str) -> None:
        self._text += text
        self._write(text)


async def stream_answer(bus: Bus, job: Job, timeout_s: float) -> int:
    """Publish ``job`` and write its text as it comes; return the exit code."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    printer = StreamPrinter(write)
    frames = await bus.frames.subscribe(job.reply, printer.on_frame)
    resume = await bus.control.serve_resume_points(job.reply, printer.resume_point)
    filling = asyncio.create_task(_fill_gaps(bus, job, printer))
    deadline = time.monotonic() + timeout_s
    try:
        await bus.jobs.publish(job)
        # The result is stored soon after the stream's end, and is the only source if the last
        # frames were lost.
        result = await _wait_for_result(bus, job.tenant, job.request_id, deadline, printer.ended)
    finally:
        filling.cancel()
        await asyncio.wait((filling,))
        await frames.close()
        await resume.close()
    if result is None:
        return _timed_out(job.tenant, job.request_id, timeout_s)
    printer.show_rest(result.text)
    write("\n")
    if result.tool_calls:
        write(f"{_calls(result)}\n")
    return _exit_code(result)


async def _fill_gaps(bus: Bus, job: Job, printer: StreamPrinter) -> None:
    """Ask the worker of ``job`` for lost frames while tokens are missing. The stored result has the
    tokens that no worker has any more."""
    while True:
        await printer.gap.wait()
        if printer.worker_id:
            replay = Replay(
                request_id=job.request_id, from_index=printer.next_index, reply=job.reply
            )
            # Retry while the worker or the bus is unreachable.
            with contextlib.suppress(MillraceError):
                await bus.control.command(printer.worker_id, replay, _REPLAY_TIMEOUT_S)
        await asyncio.sleep(_REPLAY_INTERVAL_S)


async def print_result(bus: Bus, tenant: str, request_id: str, timeout_s: float) -> int:
    """Wait for a stored result and print it; return the exit code."""
    result = await _wait_for_result(bus, tenant, request_id, time.monotonic() + timeout_s)
    if result is None:
        return _timed_out(tenant, request_id, timeout_s)
    print(_shown(result))
    return _exit_code(result)


def _shown(result: JobResult) -> str:
    """Return the text with tool calls as JSON after it, or as JSON an embedding or the texts of a
    beam search, the best first."""
    if result.embedding:
        return json.dumps(_numbers(result.embedding))
    if result.beams:
        return json.dumps([beam.text for beam in result.beams], ensure_ascii=False)
    if result.tool_calls:
        return "\n".join(filter(None, (result.text, _calls(result))))
    return result.text


def _calls(result: JobResult) -> str:
    return json.dumps(msgspec.to_builtins(result.tool_calls), ensure_ascii=False)


def _numbers(embedding: bytes) -> list[float]:
    return [number for (number,) in struct.iter_unpack("<f", embedding)]


async def _wait_for_result(
    bus: Bus,
    tenant: str,
    request_id: str,
    deadline: float,
    ended: asyncio.Event | None = None,
) -> JobResult | None:
    """Return the stored result, or None at the deadline; ``ended`` triggers a look at once."""
    pause_s = _FIRST_POLL_S
    while True:
        result = await bus.results.fetch(tenant, request_id)
        left_s = deadline - time.monotonic()
        if result is not None or left_s <= 0:
            return result
        if ended is None or ended.is_set():
            await asyncio.sleep(min(pause_s, left_s))
        elif await _set_within(ended, min(pause_s, left_s)):
            pause_s = _FIRST_POLL_S
            continue
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _exit_code(result: JobResult) -> int:
    if result.status == "done":
        return 0
    why = f": {result.error_message} ({result.error_code})" if result.error_code else ""
    print(f"the request ended as {result.status}{why}", file=sys.stderr)
    return 1


def _timed_out(tenant: str, request_id: str, timeout_s: float) -> int:
    print(
        f"no result after {timeout_s:g} s; the job continues. Fetch it later with: "
        f"millrace result {request_id} --tenant {tenant}",
        file=sys.stderr,
    )
    return 1
