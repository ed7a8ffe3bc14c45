"""Threads for work on long texts, so that the event loop never waits for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millrace.runtime.process import release_free_memory
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Job

_T = TypeVar("_T")

# Longer texts take long enough to leave the event loop.
MAX_INLINE_CHARACTERS = 4_096

_MIN_THREADS = 2
_MAX_THREADS = 8
_MAX_WAITING_CHARACTERS = 32 * 1024 * 1024
# The allocator's memory for this much text is released once no more text has arrived for a while.
_TRIM_CHARACTERS = 1024 * 1024
_TRIM_AFTER_S = 1.0
# A message takes the template as long as this much text takes the tokenizer.
_MESSAGE_CHARACTERS = 8


class TooManyLongPromptsError(
    MillraceError, code="too_many_long_prompts", retryable=True, http_status=429
):
    """Refusal of a long prompt: too many of the tenant's long prompts are waiting."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(
            f"{num_waiting} characters of your prompts are waiting to be read, and at most {limit} "
            "may. Try again when some of them are answered."
        )


class _Tenant:
    """Work of one tenant, running and waiting."""

    def __init__(self, num_slots: int) -> None:
        self.slots = asyncio.Semaphore(num_slots)
        self.num_works = 0
        self.num_characters = 0


class PromptPool:
    """Runner of work on texts: short ones at once, long ones in ``num_threads`` threads of its own.

    A tenant has half of the threads at most; its next work begins when one has ended. Tenants take
    turns. Abandoned work keeps its thread until it is done. Memory of long texts is released to the
    system when none has arrived for a second. Owns the threads; they end after ``close``, with
    their work.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(_MAX_THREADS, max(_MIN_THREADS, (os.cpu_count() or 1) // 2))
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="prompt")
        self._slots = asyncio.Semaphore(num_threads)
        self._slots_per_tenant = max(1, num_threads // 2)
        self._tenants: dict[str, _Tenant] = {}
        self._untrimmed = 0
        self._is_closed = False
        self._trim_timer: asyncio.TimerHandle | None = None

    @property
    def num_works(self) -> int:
        """Number of long texts that are running or waiting."""
        return sum(tenant.num_works for tenant in self._tenants.values())

    def check_room(self, tenant: str, num_characters: int) -> None:
        """Raise TooManyLongPromptsError if too much of a tenant's text is waiting."""
        known = self._tenants.get(tenant)
        if known is None or num_characters <= MAX_INLINE_CHARACTERS:
            return
        if known.num_characters + num_characters > _MAX_WAITING_CHARACTERS:
            raise TooManyLongPromptsError(known.num_characters, _MAX_WAITING_CHARACTERS)

    async def run(self, tenant: str, num_characters: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a text of a tenant, and return its result or raise its error."""
        if num_characters <= MAX_INLINE_CHARACTERS:
            return work()
        known = self._tenants.setdefault(tenant, _Tenant(self._slots_per_tenant))
        known.num_works += 1
        known.num_characters += num_characters
        try:
            # Decoding so long a text has blocked the event loop. Others get their turn before the
            # thread competes with the loop for the interpreter.
            await asyncio.sleep(0)
            async with known.slots, self._slots:
                return await self._in_thread(work)
        finally:
            known.num_works -= 1
            known.num_characters -= num_characters
            if not known.num_works:
                del self._tenants[tenant]
            self._trim_later(num_characters)

    def close(self) -> None:
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be stopped, and its place is not free before it has ended.
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise
        finally:
            # Its error refers to this frame and, through its callers, to the whole text. Without
            # this cycle the memory does not wait for the garbage collector.
            del running

    def _trim_later(self, num_characters: int) -> None:
        self._untrimmed += num_characters
        if self._untrimmed < _TRIM_CHARACTERS or self._is_closed:
            return
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        loop = asyncio.get_running_loop()
        self._trim_timer = loop.call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trim_timer = None
        if self.num_works:
            return  # the end of the work trims again
        self._untrimmed = 0
        self._executor.submit(release_free_memory)


def num_characters(job: Job) -> int:
    """Return the amount of text to read when a job is prepared, tool schemas included."""
    messages = len(job.messages or ()) * _MESSAGE_CHARACTERS
    if messages > MAX_INLINE_CHARACTERS:
        return messages  # it is long already, and counting on would take long
    messages += sum(len(message.content) for message in job.messages or ())
    tools = sum(len(tool.description) + len(repr(tool.parameters)) for tool in job.tools)
    texts = len(job.prompt or "") + len(job.text_pair or "") + len(job.prediction)
    return texts + len(job.prompt_token_ids or ()) + messages + tools


def num_characters_with(chat_template: str | None, num_characters: int) -> int:
    """Return the amount of text that a prompt counts as, given a request's own template.

    A caller's template may take any time, so it always runs in a thread.
    """
    if chat_template is None:
        return num_characters
    return max(num_characters, MAX_INLINE_CHARACTERS + 1)
