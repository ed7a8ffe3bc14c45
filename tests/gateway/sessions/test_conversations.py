"""Sessions stored in a real Redis."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from millrace.bus.redis_keys import session_key, session_turn_key
from millrace.gateway.sessions.sessions import SessionNotFoundError
from millrace.gateway.sessions.store import SessionTooLargeError, SessionUnreadableError
from millrace.gateway.tenancy.identity import LOCAL, Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.sampling import SamplingParams
from tests.gateway.sessions.fronts import (
    LONG,
    MODEL,
    SESSION,
    Front,
    Make,
    assistant,
    is_gone,
    user,
)
from tests.support.waiting import eventually


async def test_a_conversation_goes_on(front: Front) -> None:
    first = await front.exchange("What is TTFT?", "The time to the first token.")
    assert first.messages == (user("What is TTFT?"),)
    assert (first.info.version, first.info.num_messages, first.info.num_dropped) == (0, 0, 0)

    second = await front.begin(user("And TPOT?"))
    assert second.messages == (
        user("What is TTFT?"),
        assistant("The time to the first token."),
        user("And TPOT?"),
    )
    assert (second.info.session_id, second.info.version, second.info.num_messages) == (
        SESSION,
        1,
        2,
    )
    assert len(await front.kept()) == 2, "a turn without an answer is not kept"
    history = await front.sessions.history("local", SESSION)
    assert (history.session_id, history.version, history.num_summarised) == (SESSION, 1, 0)


async def test_a_session_is_compressed_json_that_expires(front: Front, redis: Redis) -> None:
    await front.exchange("a" * 1_000, "b")
    key = f"ctx:{SESSION}"
    data = await redis.hget(key, "data")
    assert isinstance(data, bytes)
    assert len(data) < 500
    messages = msgspec.json.decode(zlib.decompress(data))["messages"]
    assert messages[0][0] == {"role": "user", "content": "a" * 1_000}
    assert 3_590_000 < await redis.pttl(key) <= 3_600_000

    await redis.pexpire(key, 5_000)
    assert 4 < (await front.sessions.history("local", SESSION)).expires_in_s <= 5
    await front.begin(user("c"))
    assert 3_590_000 < await redis.pttl(key) <= 3_600_000, "use renews it"
    assert 0 < await redis.pttl(session_turn_key("local", SESSION, "r")) <= 720_000


async def test_an_expired_conversation_begins_anew(front: Front, redis: Redis) -> None:
    await front.exchange("a", "b")
    await front.begin(user("c"), request_id="late")
    await redis.pexpire(session_key("local", SESSION), 1)
    await eventually(lambda: is_gone(redis, session_key("local", SESSION)))
    with pytest.raises(SessionNotFoundError):
        await front.kept()
    await front.commit(assistant("d"), request_id="late")
    assert await front.texts() == ["c", "d"], "an answer is not lost with what went before"


async def test_tenants_do_not_see_each_other(front: Front, redis: Redis) -> None:
    other = Caller(tenant="acme", tier=Tier.PRO)
    await front.exchange("mine", "yes")
    assert (await front.begin(user("x"), caller=other)).messages == (user("x"),)
    await front.commit(assistant("theirs"), tenant="acme")
    assert await front.texts() == ["mine", "yes"]
    assert await redis.exists(f"ctx:acme:{SESSION}")
    with pytest.raises(SessionNotFoundError):
        await front.sessions.history("evil", SESSION)


@given(st.tuples(st.text(max_size=8), st.text(max_size=8)), st.tuples(st.text(), st.text()))
def test_no_conversation_has_the_key_of_another(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (session_key(*one) == session_key(*other)) == (one == other)
    assert session_key("local", "acme:s") != session_key("acme", "s")


async def test_what_cannot_continue_a_conversation(front: Front) -> None:
    request = GenerationRequest(
        model=MODEL, prompt="x", sampling=SamplingParams(), session_id=SESSION
    )
    with pytest.raises(ParameterError) as refused:
        await front.sessions.open_turn(LOCAL, request, front.model, "r")
    assert refused.value.param == "session_id"


async def test_the_oldest_turns_are_left_out_of_a_long_one(front: Front) -> None:
    for number in range(16):
        await front.exchange(f"{number}: {LONG}", f"{number}: {LONG}")
    fitted = await front.begin(user("The last one?"), max_tokens=200)
    num_tokens = len(front.model.tokenizer.encode_chat(fitted.messages))
    assert num_tokens <= front.model.context_window_tokens - 200
    assert fitted.info.num_messages == 32
    assert fitted.info.num_dropped == 33 - len(fitted.messages)
    assert fitted.info.num_dropped % 2 == 0
    assert len(await front.kept()) == 32, "they are kept for a larger window"
    tight = await front.begin(user("x"), caller=Caller(tenant="local", context_tokens=400))
    assert len(front.model.tokenizer.encode_chat(tight.messages)) <= 300


async def test_a_system_prompt_may_come_with_each_turn(front: Front) -> None:
    system = ChatMessage("system", "Be brief.")
    for number in range(2):
        await front.begin(system, user(str(number)))
        await front.commit(assistant("ok"))
    assert await front.texts() == ["Be brief.", "0", "ok", "1", "ok"]


async def test_a_retry_forgets_what_it_replaces(front: Front) -> None:
    await front.exchange("q1", "a1")
    await front.exchange("q2", "a2")
    again = await front.exchange("q2", "better", keep=2)
    assert [one.content for one in again.messages] == ["q1", "a1", "q2"]
    assert again.info.num_messages == 2
    assert await front.texts() == ["q1", "a1", "q2", "better"]
    await front.exchange("afresh", "yes", keep=0)
    assert await front.texts() == ["afresh", "yes"]
    with pytest.raises(ParameterError, match="at least 0"):
        await front.begin(user("x"), keep=-1)


async def test_a_retry_forgets_nothing_that_came_meanwhile(front: Front) -> None:
    await front.exchange("q1", "a1")
    await front.begin(user("q1 again"), request_id="retry", keep=0)
    await front.exchange("from the other tab", "a2")
    await front.commit(assistant("better"), request_id="retry")
    assert await front.texts() == ["q1", "a1", "from the other tab", "a2", "q1 again", "better"]


async def test_a_deleted_session_stays_deleted(front: Front, redis: Redis) -> None:
    await front.exchange("q1", "a1")
    await front.begin(user("q2"), request_id="running")
    await front.sessions.delete("local", SESSION)
    assert await redis.hkeys(session_key("local", SESSION)) == [b"version", b"floor"]
    assert 0 < await redis.pttl(session_key("local", SESSION)) <= 720_000
    await front.commit(assistant("a2"), request_id="running")
    with pytest.raises(SessionNotFoundError):
        await front.kept()
    with pytest.raises(SessionNotFoundError):
        await front.sessions.delete("local", SESSION)
    assert (await front.exchange("new", "yes")).messages == (user("new"),)
    assert await front.texts() == ["new", "yes"]


async def test_a_session_has_limits_of_bytes_and_messages(make: Make) -> None:
    front = make(GatewayConfig(session_max_bytes=2_000, session_max_messages=5))
    await front.exchange("q" * 500, "a" * 500)
    with pytest.raises(SessionTooLargeError, match=r"hold 2\d\d\d bytes; the limit is 2000 bytes"):
        await front.begin(user("x" * 1_000))
    await front.begin(user("x" * 1_000), keep=1)
    with pytest.raises(SessionTooLargeError, match="hold 6 messages; the limit is 5 messages"):
        await front.begin(*[user("x")] * 4)
    assert SessionTooLargeError.http_status == 413


async def test_a_session_of_an_unknown_format_is_unreadable(front: Front, redis: Redis) -> None:
    for data in (b"x", zlib.compress(b"{"), zlib.compress(b'{"messages":[[{"role":1}]]}')):
        await redis.hset(session_key("local", SESSION), mapping={"version": 1, "data": data})
        with pytest.raises(SessionUnreadableError):
            await front.begin(user("x"))
        await front.sessions.delete("local", SESSION)
