"""Answers to asynchronous jobs on the terminal, as they stream or once they are stored."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from schemas.control import ResumePoint
from schemas.frames import TERMINAL_FRAMES, Delta, Frame

if TYPE_CHECKING:
    from bus.api import Bus
    from schemas.jobs import Job, JobResult

_FIRST_POLL_S = 0.02
_LONGEST_POLL_S = 0.5


class StreamPrinter:
    """Writes the text of one request as its frames come, each token once.

    Frames of an older epoch and tokens that were written are dropped. After a gap nothing more is
    written: the stored result has the rest.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._epoch = 0
        self.token_ids: list[int] = []
        self.text = ""
        self.has_gap = False
        self.ended = asyncio.Event()

    def on_frame(self, _request_id: str, frame: Frame) -> None:
        """Take a frame; it is the callback of the subscription."""
        if self.ended.is_set() or frame.epoch < self._epoch:
            return
        self._epoch = frame.epoch
        if isinstance(frame, Delta):
            self._on_delta(frame)
        elif isinstance(frame, TERMINAL_FRAMES):
            self.ended.set()

    def resume_point(self, _request_id: str) -> ResumePoint:
        """What was written, for a worker that goes on with the request."""
        return ResumePoint(token_ids=tuple(self.token_ids))

    def _on_delta(self, delta: Delta) -> None:
        num_known = len(self.token_ids) - delta.index
        if num_known < 0:
            self.has_gap = True
        if self.has_gap or num_known >= len(delta.token_ids) > 0:
            return
        self.token_ids += delta.token_ids[num_known:]
        known_text = delta.text_ends[num_known - 1] if num_known and delta.text_ends else 0
        self._show(delta.text[known_text:])

    def show_rest(self, text: str) -> None:
        """Write what the whole ``text`` has beyond what was written, if anything."""
        if text.startswith(self.text):
            self._show(text[len(self.text) :])
        else:
            self._show(f"\n{text}")

    def _show(self, text: str) -> None:
        self.text += text
        self._write(text)


async def stream_answer(bus: Bus, job: Job, timeout_s: float) -> int:
    """Publish ``job`` and write its text as it comes; the command's exit code."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    printer = StreamPrinter(write)
    frames = await bus.frames.subscribe(job.reply, printer.on_frame)
    resume = await bus.control.serve_resume_points(job.reply, printer.resume_point)
    deadline = time.monotonic() + timeout_s
    try:
        await bus.jobs.publish(job)
        # Stored soon after the stream's end; it comes alone if the last frames were lost.
        result = await _wait_for_result(bus, job.tenant, job.request_id, deadline, printer.ended)
    finally:
        await frames.close()
        await resume.close()
    if result is None:
        return _timed_out(job.tenant, job.request_id, timeout_s)
    printer.show_rest(result.text)
    write("\n")
    return _exit_code(result)


async def print_result(bus: Bus, tenant: str, request_id: str, timeout_s: float) -> int:
    """Wait for a stored result and print it; the command's exit code."""
    result = await _wait_for_result(bus, tenant, request_id, time.monotonic() + timeout_s)
    if result is None:
        return _timed_out(tenant, request_id, timeout_s)
    print(result.text)
    return _exit_code(result)


async def _wait_for_result(
    bus: Bus,
    tenant: str,
    request_id: str,
    deadline: float,
    ended: asyncio.Event | None = None,
) -> JobResult | None:
    """The stored result, or None at the deadline; ``ended`` says to look again at once."""
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
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _exit_code(result: JobResult) -> int:
    if result.status == "done":
        return 0
    why = f": {result.error_message} ({result.error_code})" if result.error_code else ""
    print(f"the request ended as {result.status}{why}", file=sys.stderr)
    return 1


def _timed_out(tenant: str, request_id: str, timeout_s: float) -> int:
    print(
        f"no result after {timeout_s:g} s; the job goes on. Fetch it later with: "
        f"millrace result {request_id} --tenant {tenant}",
        file=sys.stderr,
    )
    return 1
