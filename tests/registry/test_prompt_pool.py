"""Pool of threads for long texts: their number, and the tenants' shares."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial

import pytest

from millrace.registry.tokenizers.prompt_pool import (
    MAX_INLINE_CHARACTERS,
    PromptPool,
    TooManyLongPromptsError,
)
from tests.support.waiting import eventually

LONG = MAX_INLINE_CHARACTERS + 1


class Held:
    """Work that begins and then waits for its release."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.go.wait(30)
        return name


@pytest.fixture
async def pool() -> AsyncIterator[PromptPool]:
    made = PromptPool(2)
    yield made
    made.close()


async def test_short_texts_are_read_at_once(pool: PromptPool) -> None:
    here = threading.get_ident()
    assert await pool.run("acme", MAX_INLINE_CHARACTERS, threading.get_ident) == here
    assert await pool.run("acme", LONG, threading.get_ident) != here


async def test_a_tenant_has_half_of_the_threads_and_others_take_turns(pool: PromptPool) -> None:
    held = Held()

    def start(tenant: str, name: str) -> asyncio.Task[str]:
        return asyncio.create_task(pool.run(tenant, LONG, lambda: held.work(name)))

    first = [start("acme", f"acme {number}") for number in range(8)]
    await eventually(lambda: held.begun == ["acme 0"])
    other = start("other", "other 0")
    await eventually(lambda: held.begun == ["acme 0", "other 0"])
    assert pool.num_works == 9
    held.go.set()
    assert await asyncio.gather(*first) == [f"acme {number}" for number in range(8)]
    assert await other == "other 0"
    assert pool.num_works == 0


async def test_caller_that_gives_up_keeps_its_thread_until_it_is_free(pool: PromptPool) -> None:
    held = Held()
    given_up = asyncio.create_task(pool.run("acme", LONG, lambda: held.work("first")))
    await eventually(lambda: held.begun == ["first"])
    given_up.cancel()
    following = asyncio.create_task(pool.run("acme", LONG, lambda: held.work("second")))
    await eventually(lambda: pool.num_works == 2)
    assert held.begun == ["first"]
    held.go.set()
    assert await following == "second"
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_what_waits_of_one_tenant_is_bounded(pool: PromptPool) -> None:
    held = Held()
    size = 16 * 1024 * 1024
    waiting = [
        asyncio.create_task(pool.run("acme", size, lambda: held.work("it"))) for _ in range(2)
    ]
    await eventually(lambda: pool.num_works == 2)
    with pytest.raises(TooManyLongPromptsError, match="33554432"):
        pool.check_room("acme", LONG)
    pool.check_room("acme", MAX_INLINE_CHARACTERS)
    pool.check_room("other", size)
    held.go.set()
    await asyncio.gather(*waiting)
    pool.check_room("acme", size)


async def test_nothing_of_a_text_that_was_refused_waits_for_the_garbage_collector(
    pool: PromptPool,
) -> None:
    class Text:
        pass

    async def refused() -> weakref.ref[Text]:
        text = Text()

        def fail(_text: Text) -> None:
            raise LookupError

        with contextlib.suppress(LookupError):
            await pool.run("acme", LONG, partial(fail, text))
        return weakref.ref(text)

    gc.disable()
    try:
        left = await refused()
        # The thread lets go of its work a moment after its end.
        await eventually(lambda: left() is None)
    finally:
        gc.enable()


async def test_an_error_is_whose_work_it_was(pool: PromptPool) -> None:
    def fail() -> None:
        raise LookupError("this one")

    with pytest.raises(LookupError, match="this one"):
        await pool.run("acme", LONG, fail)
    assert pool.num_works == 0
