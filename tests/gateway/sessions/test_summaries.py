"""The oldest turns of long conversations become summaries."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from millrace.bus.redis_keys import session_summary_key
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.errors import BusUnavailableError, MillraceError, ParameterError
from millrace.schemas.jobs import Tier
from tests.gateway.sessions.fronts import (
    LONG,
    MODEL,
    SESSION,
    SUMMARIES,
    Front,
    Make,
    assistant,
    is_gone,
    user,
)
from tests.support.waiting import eventually


class Summariser:
    """Stands for the model: answers once it is let."""

    def __init__(self, answer: str | MillraceError = "They spoke of tokens.") -> None:
        self.answer = answer
        self.requests: list[tuple[str, str, GenerationRequest]] = []
        self.gate = asyncio.Event()

    async def __call__(self, tenant: str, request_id: str, request: GenerationRequest) -> str:
        self.requests.append((tenant, request_id, request))
        await self.gate.wait()
        if isinstance(self.answer, MillraceError):
            raise self.answer
        return self.answer


async def talk_until_summarised(front: Front, summariser: Summariser) -> int:
    """Exchanges until a summary is asked for; how many messages there are then."""
    for number in range(40):
        await front.exchange(f"question {number} {LONG}", f"answer {number}")
        await asyncio.sleep(0)
        if await _has_job(summariser, front):
            return 2 * (number + 1)
    raise AssertionError("no summary was asked for")


async def _has_job(summariser: Summariser, front: Front) -> bool:
    """A summary that was begun asks Redis for the lock first; one more round trip is behind it."""
    await front.link.call("PING")
    await front.link.call("PING")
    return bool(summariser.requests)


async def test_the_oldest_turns_become_a_summary(make: Make, redis: Redis) -> None:
    summariser = Summariser()
    front = make(SUMMARIES, generate=summariser)
    num_messages = await talk_until_summarised(front, summariser)
    ((tenant, request_id, request),) = summariser.requests
    assert request_id.startswith("sum-")
    assert (tenant, request.model, request.session_id) == ("local", MODEL, SESSION)
    assert request.sampling.max_tokens == SUMMARIES.session_summary_tokens
    assert request.messages is not None
    assert "User: question 0" in request.messages[0].content
    assert "Assistant: answer 0" in request.messages[0].content
    num_prompt_tokens = len(front.model.tokenizer.encode_chat(request.messages))
    ready = num_prompt_tokens + SUMMARIES.session_summary_tokens
    assert ready <= front.model.context_window_tokens

    # No request waits for the summary, and turns added meanwhile stay.
    before = await front.exchange("meanwhile", "yes")
    assert before.info.num_summarised == 0
    summariser.gate.set()
    await eventually(lambda: _is_summarised(front))
    history = await front.sessions.history("local", SESSION)
    assert history.summary == "They spoke of tokens."
    assert history.num_summarised + len(history.messages) == num_messages + 2
    assert history.messages[0].content.startswith(f"question {history.num_summarised // 2} ")
    assert history.messages[-1] == assistant("yes")

    after = await front.begin(user("and now?"))
    assert after.info.num_summarised == history.num_summarised
    assert after.info.num_messages == num_messages + 2
    assert after.info.num_dropped == 0
    assert "They spoke of tokens." in after.messages[0].content
    assert after.messages[0].role == "system"
    await eventually(lambda: is_gone(redis, session_summary_key("local", SESSION)))

    least = history.num_summarised
    with pytest.raises(ParameterError, match=f"keep at least {least}"):
        await front.begin(user("x"), keep=least - 2)
    assert len((await front.begin(user("x"), keep=least + 2)).messages) == 4
    assert (await front.begin(user("x"), keep=0)).messages == (user("x"),)


async def _is_summarised(front: Front) -> bool:
    return bool((await front.sessions.history("local", SESSION)).summary)


async def test_a_second_summary_takes_the_first_one_in(make: Make) -> None:
    summariser = Summariser()
    summariser.gate.set()
    front = make(SUMMARIES, generate=summariser)
    await talk_until_summarised(front, summariser)
    await eventually(lambda: _is_summarised(front))
    first = (await front.sessions.history("local", SESSION)).num_summarised
    summariser.requests.clear()
    await talk_until_summarised(front, summariser)
    messages = summariser.requests[0][2].messages
    assert messages is not None
    assert "What went before: They spoke of tokens." in messages[0].content

    async def has_more() -> bool:
        return (await front.sessions.history("local", SESSION)).num_summarised > first

    await eventually(has_more)


async def test_gateways_do_not_summarise_at_once(make: Make) -> None:
    summariser = Summariser()
    one, other = make(SUMMARIES, generate=summariser), make(SUMMARIES, generate=summariser)
    await talk_until_summarised(one, summariser)
    for number in range(3):
        await other.exchange(f"more {number}", "ok")
        await _has_job(summariser, other)
    assert len(summariser.requests) == 1


async def test_a_failed_summary_changes_nothing(make: Make, redis: Redis) -> None:
    summariser = Summariser(BusUnavailableError("away"))
    summariser.gate.set()
    front = make(SUMMARIES, generate=summariser)
    num_messages = await talk_until_summarised(front, summariser)
    lock = session_summary_key("local", SESSION)

    async def pauses() -> bool:
        return 0 < await redis.pttl(lock) <= 60_000

    await eventually(pauses)
    history = await front.sessions.history("local", SESSION)
    assert (history.summary, len(history.messages)) == ("", num_messages)
    await front.exchange("next", "ok")
    await _has_job(summariser, front)
    assert len(summariser.requests) == 1, "it is not tried again at once"


async def test_a_deleted_conversation_is_not_summarised(make: Make, redis: Redis) -> None:
    summariser = Summariser()
    front = make(SUMMARIES, generate=summariser)
    await talk_until_summarised(front, summariser)
    await front.sessions.delete("local", SESSION)
    await front.exchange("new", "yes")
    summariser.gate.set()
    await eventually(lambda: is_gone(redis, session_summary_key("local", SESSION)))
    assert await front.texts() == ["new", "yes"]


async def test_a_tier_without_summaries(make: Make) -> None:
    front = make(SUMMARIES)
    free = Caller(tenant="local", tier=Tier.FREE)
    for number in range(20):
        request_id = f"r{number}"
        fitted = await front.begin(user(LONG), request_id=request_id, caller=free)
        await front.commit(assistant(LONG), request_id=request_id)
    assert fitted.info.num_dropped > 0
