"""Conversations that several tabs and gateways change at once, and a Redis that goes away."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from millrace.gateway.models import LoadedModels
from millrace.gateway.sessions.sessions import SessionNotFoundError, Sessions
from millrace.gateway.tenancy.identity import LOCAL
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.config import GatewayConfig
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.tools import ToolCall
from tests.gateway.sessions.fronts import (
    MODEL,
    SESSION,
    Front,
    Make,
    assistant,
    no_summary,
    user,
)
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer
from tests.support.waiting import eventually


async def test_tabs_at_the_same_time_lose_nothing(make: Make) -> None:
    fronts = [make(), make()]
    await fronts[0].exchange("q", "a")
    names = [f"r{number}" for number in range(24)]
    for number, name in enumerate(names):
        await fronts[number % 2].begin(user(name), request_id=name)
    await asyncio.gather(
        *(
            fronts[(number + 1) % 2].commit(assistant(f"to {name}"), request_id=name)
            for number, name in enumerate(names)
        )
    )
    texts = await fronts[0].texts()
    assert texts[:2] == ["q", "a"]
    pairs = list(zip(texts[2::2], texts[3::2], strict=True))
    assert sorted(pairs) == sorted((name, f"to {name}") for name in names)
    assert (await fronts[0].sessions.history("local", SESSION)).version == 25


async def test_requests_at_the_same_time_do_not_fill_it_without_end(make: Make) -> None:
    front = make(GatewayConfig(session_max_bytes=2_000))
    names = [f"r{number}" for number in range(10)]
    for name in names:
        await front.begin(user("q" * 500), request_id=name)
    for name in names:
        await front.commit(assistant("a" * 500), request_id=name)
    assert len(await front.texts()) == 4
    # A request that starts anew is still accepted.
    await front.exchange("new", "yes", keep=0)
    assert await front.texts() == ["new", "yes"]


async def test_a_request_that_was_refused_leaves_nothing(front: Front, redis: Redis) -> None:
    await front.begin(user("q"), request_id="r1")
    await front.sessions.abandon_turn("local", SESSION, "r1")
    assert await redis.keys("ctx*") == []
    await front.commit(assistant("a"), request_id="r1")
    with pytest.raises(SessionNotFoundError):
        await front.kept()


async def test_a_request_is_committed_once(make: Make) -> None:
    one, other = make(), make()
    await one.begin(user("q"), request_id="r1")
    await asyncio.gather(
        *(front.commit(assistant("a"), request_id="r1") for front in (one, other) for _ in range(5))
    )
    await other.commit(assistant("a"), request_id="r1")
    assert await one.texts() == ["q", "a"]


async def test_nothing_said_changes_nothing(front: Front) -> None:
    await front.begin(user("q"))
    await front.commit()
    await front.commit(assistant(""))
    with pytest.raises(SessionNotFoundError):
        await front.kept()


async def test_all_rounds_of_tools_are_kept(front: Front) -> None:
    call = ChatMessage("assistant", "", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),))
    result = ChatMessage("tool", "", tool_call_id="c")
    await front.begin(user("q"))
    await front.commit(call, result, assistant(""))
    assert await front.kept() == (user("q"), call, result)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "commit", "commit", "delete"]),
            st.integers(0, 3),
            st.none() | st.integers(0, 6),
        ),
        max_size=24,
    )
)
async def test_any_order_of_requests(
    make: Make, redis: Redis, steps: list[tuple[str, int, int | None]]
) -> None:
    """Sessions match a plain list for any order of requests.

    A turn is appended to the list; if nothing was added since it began, it follows the messages
    that it keeps.
    """
    await redis.flushall()
    fronts = [make(), make()]
    expected: list[str] = []
    changes = 0
    running: dict[int, tuple[str, int, int | None]] = {}
    try:
        for number, (step, tab, keep) in enumerate(steps):
            front = fronts[tab % 2]
            if step == "begin":
                name = f"r{number}"
                fitted = await front.begin(user(name), request_id=name, keep=keep)
                assert [one.content for one in fitted.messages] == [*expected[:keep], name]
                running[tab] = (name, changes, keep)
            elif step == "commit" and tab in running:
                name, base, keep = running[tab]
                await front.commit(assistant("ok"), request_id=name)
                if base >= 0:
                    expected = [*(expected[:keep] if base == changes else expected), name, "ok"]
                    changes += 1
                running[tab] = (name, -1, keep)
            elif step == "delete":
                if expected:
                    await front.sessions.delete("local", SESSION)
                else:
                    with pytest.raises(SessionNotFoundError):
                        await front.sessions.delete("local", SESSION)
                expected, changes = [], changes + 1
                running = {tab: (name, -1, keep) for tab, (name, _, keep) in running.items()}
            if expected:
                assert await front.texts() == expected
    finally:
        for front in fronts:
            await front.close()


async def test_an_answer_waits_for_redis(make: Make, redis_server: RedisServer) -> None:
    clock = ManualClock()
    front = make(clock=clock)
    await front.begin(user("q"))
    redis_server.pause()
    try:
        await front.commit(assistant("a"))
        with pytest.raises(RedisUnreachableError):
            await front.begin(user("x"), request_id="other")
    finally:
        redis_server.resume()
    await clock.advance(1.5)
    await eventually(lambda: _is_kept(front, ["q", "a"]))


async def _is_kept(front: Front, texts: list[str]) -> bool:
    try:
        return await front.texts() == texts
    except SessionNotFoundError:
        return False


async def test_a_full_redis_counts_as_away(front: Front, redis: Redis) -> None:
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnreachableError):
            await front.begin(user("q"))
    finally:
        await redis.config_set("maxmemory", 0)
    await front.begin(user("q"))


async def test_without_redis(model: ServedModel) -> None:
    sessions = Sessions(
        None,
        GatewayConfig(),
        SystemClock(),
        LoadedModels({}, lambda _: model),
        no_summary,
        lambda _: (),
        PromptPool(),
    )
    request = GenerationRequest(
        model=MODEL, messages=(user("q"),), sampling=SamplingParams(), session_id=SESSION
    )
    with pytest.raises(RedisUnreachableError):
        await sessions.open_turn(LOCAL, request, model, "r")
    with pytest.raises(RedisUnreachableError):
        await sessions.history("local", SESSION)
    await sessions.close()
