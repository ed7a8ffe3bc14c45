"""Conversations kept in a real Redis, by one gateway or several."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from bus.clock import Clock, ManualClock, SystemClock
from bus.redis_link import RedisAwayError, RedisLink
from bus.subjects import session_key, session_summary_key, session_turn_key
from gateway.caller import LOCAL, Caller
from gateway.errors import refusal_of
from gateway.identity import Identity
from gateway.models import Models
from gateway.parsing import Ask
from gateway.session_store import SessionTooLargeError, SessionUnreadableError
from gateway.sessions import FittedSession, SessionNotFoundError, Sessions
from gateway.sessions_api import SessionsApi
from registry.catalogue import load_catalogue
from registry.served import ServedModel
from schemas.config import GatewayConfig, RedisConfig, SessionContexts
from schemas.errors import BusUnavailableError, MillraceError, ParameterError
from schemas.jobs import ChatMessage, Job, Source, Tier
from schemas.openai import ModelCard
from schemas.sampling import SamplingParams
from schemas.tools import ToolCall
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

MODEL = "demo"
SESSION = "s-1"
NO_SUMMARIES = SessionContexts(pro="window", enterprise="window")
SUMMARIES = GatewayConfig(session_context=SessionContexts(free="window"))
# Half a hundred tokens of the demo model's.
LONG = "The gateway sends tokens to the client as they come, and the worker makes them. " * 3

Generate = Callable[[Job], Awaitable[str]]


async def no_summary(_job: Job) -> str:
    raise AssertionError("nothing asked for a summary")


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


class Front:
    """What a gateway has of sessions, on a link of its own."""

    def __init__(
        self,
        url: str,
        model: ServedModel,
        config: GatewayConfig | None = None,
        clock: Clock | None = None,
        generate: Generate = no_summary,
    ) -> None:
        clock = clock or SystemClock()
        config = config or GatewayConfig(session_context=NO_SUMMARIES)
        self.model = model
        self.link = RedisLink(RedisConfig(url=url), clock)
        card = ModelCard(id=MODEL, created=0, max_model_len=None)
        models = Models({MODEL: card}, lambda _name: model)
        self.sessions = Sessions(self.link, config, clock, models, generate, lambda _names: ())
        self.identity = Identity(self.link, config, clock)
        self._num_requests = 0

    async def begin(
        self,
        *messages: ChatMessage,
        request_id: str = "",
        keep: int | None = None,
        max_tokens: int | None = 100,
        caller: Caller = LOCAL,
        session_id: str = SESSION,
    ) -> FittedSession:
        ask = Ask(
            model=MODEL,
            messages=messages,
            sampling=SamplingParams(max_tokens=max_tokens),
            session_id=session_id,
            session_keep=keep,
        )
        return await self.sessions.begin(caller, ask, self.model, request_id or "r")

    async def commit(
        self, *answer: ChatMessage, request_id: str = "", tenant: str = "local"
    ) -> None:
        await self.sessions.commit(tenant, SESSION, request_id or "r", answer)

    async def exchange(self, question: str, answer: str, keep: int | None = None) -> FittedSession:
        """A whole request."""
        self._num_requests += 1
        request_id = f"r-{id(self)}-{self._num_requests}"
        fitted = await self.begin(user(question), request_id=request_id, keep=keep)
        await self.commit(assistant(answer), request_id=request_id)
        return fitted

    async def kept(self) -> Sequence[ChatMessage]:
        return (await self.sessions.history("local", SESSION)).messages

    async def texts(self) -> list[str]:
        return [message.content for message in await self.kept()]

    async def close(self) -> None:
        await self.sessions.close()
        await self.link.close()


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(load_catalogue(""), MODEL)


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


Make = Callable[..., Front]


@pytest.fixture
async def make(redis: Redis, redis_server: RedisServer, model: ServedModel) -> AsyncIterator[Make]:
    """Gateways over the same, empty Redis."""
    made: list[Front] = []

    def one(
        config: GatewayConfig | None = None,
        clock: Clock | None = None,
        generate: Generate = no_summary,
    ) -> Front:
        made.append(Front(redis_server.url, model, config, clock, generate))
        return made[-1]

    yield one
    for front in made:
        await front.close()


@pytest.fixture
def front(make: Make) -> Front:
    return make()


# --- one conversation ------------------------------------------------------------------------


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
    assert len(await front.kept()) == 2, "what is not answered is not kept"
    history = await front.sessions.history("local", SESSION)
    assert (history.session_id, history.version, history.num_summarised) == (SESSION, 1, 0)


async def test_it_is_compressed_json_that_expires(front: Front, redis: Redis) -> None:
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
    await eventually(lambda: _is_gone(redis, session_key("local", SESSION)))
    with pytest.raises(SessionNotFoundError):
        await front.kept()
    await front.commit(assistant("d"), request_id="late")
    assert await front.texts() == ["c", "d"], "an answer is not lost with what went before"


async def _is_gone(redis: Redis, key: str) -> bool:
    return not await redis.exists(key)


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
    ask = Ask(model=MODEL, prompt="x", sampling=SamplingParams(), session_id=SESSION)
    with pytest.raises(ParameterError) as refused:
        await front.sessions.begin(LOCAL, ask, front.model, "r")
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


# --- two tabs, two gateways ------------------------------------------------------------------


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
    """Against a plain list: a turn goes behind what is there, or, if nothing came since it began,
    behind what it keeps."""
    await redis.flushall()
    fronts = [make(), make()]
    kept: list[str] = []
    changes = 0
    running: dict[int, tuple[str, int, int | None]] = {}
    try:
        for number, (step, tab, keep) in enumerate(steps):
            front = fronts[tab % 2]
            if step == "begin":
                name = f"r{number}"
                fitted = await front.begin(user(name), request_id=name, keep=keep)
                assert [one.content for one in fitted.messages] == [*kept[:keep], name]
                running[tab] = (name, changes, keep)
            elif step == "commit" and tab in running:
                name, base, keep = running[tab]
                await front.commit(assistant("ok"), request_id=name)
                if base >= 0:
                    kept = [*(kept[:keep] if base == changes else kept), name, "ok"]
                    changes += 1
                running[tab] = (name, -1, keep)
            elif step == "delete":
                if kept:
                    await front.sessions.delete("local", SESSION)
                else:
                    with pytest.raises(SessionNotFoundError):
                        await front.sessions.delete("local", SESSION)
                kept, changes = [], changes + 1
                running = {tab: (name, -1, keep) for tab, (name, _, keep) in running.items()}
            if kept:
                assert await front.texts() == kept
    finally:
        for front in fronts:
            await front.close()


# --- keeping, deleting, bounds ---------------------------------------------------------------


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


async def test_what_is_deleted_stays_so(front: Front, redis: Redis) -> None:
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


async def test_bounds(make: Make) -> None:
    front = make(GatewayConfig(session_max_bytes=2_000, session_max_messages=5))
    await front.exchange("q" * 500, "a" * 500)
    with pytest.raises(SessionTooLargeError, match=r"hold 2\d\d\d bytes; the limit is 2000 bytes"):
        await front.begin(user("x" * 1_000))
    await front.begin(user("x" * 1_000), keep=1)
    with pytest.raises(SessionTooLargeError, match="hold 6 messages; the limit is 5 messages"):
        await front.begin(*[user("x")] * 4)
    assert SessionTooLargeError.http_status == 413


async def test_what_another_version_wrote(front: Front, redis: Redis) -> None:
    for data in (b"x", zlib.compress(b"{"), zlib.compress(b'{"messages":[[{"role":1}]]}')):
        await redis.hset(session_key("local", SESSION), mapping={"version": 1, "data": data})
        with pytest.raises(SessionUnreadableError):
            await front.begin(user("x"))
        await front.sessions.delete("local", SESSION)


# --- Redis away ------------------------------------------------------------------------------


async def test_an_answer_waits_for_redis(make: Make, redis_server: RedisServer) -> None:
    clock = ManualClock()
    front = make(clock=clock)
    await front.begin(user("q"))
    redis_server.pause()
    try:
        await front.commit(assistant("a"))
        with pytest.raises(RedisAwayError):
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
        with pytest.raises(RedisAwayError):
            await front.begin(user("q"))
    finally:
        await redis.config_set("maxmemory", 0)
    await front.begin(user("q"))


async def test_without_redis(model: ServedModel) -> None:
    sessions = Sessions(
        None, GatewayConfig(), SystemClock(), Models({}, lambda _: model), no_summary, lambda _: ()
    )
    ask = Ask(model=MODEL, messages=(user("q"),), sampling=SamplingParams(), session_id=SESSION)
    with pytest.raises(RedisAwayError):
        await sessions.begin(LOCAL, ask, model, "r")
    with pytest.raises(RedisAwayError):
        await sessions.history("local", SESSION)
    await sessions.close()


# --- summaries -------------------------------------------------------------------------------


class Summariser:
    """Stands for the model: answers once it is let."""

    def __init__(self, answer: str | MillraceError = "They spoke of tokens.") -> None:
        self.answer = answer
        self.jobs: list[Job] = []
        self.gate = asyncio.Event()

    async def __call__(self, job: Job) -> str:
        self.jobs.append(job)
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
    return bool(summariser.jobs)


async def test_the_oldest_turns_become_a_summary(make: Make, redis: Redis) -> None:
    summariser = Summariser()
    front = make(SUMMARIES, generate=summariser)
    num_messages = await talk_until_summarised(front, summariser)
    (job,) = summariser.jobs
    assert job.request_id.startswith("sum-")
    assert (job.tenant, job.tier, job.source, job.model) == (
        "local",
        Tier.BATCH,
        Source.HTTP,
        MODEL,
    )
    assert job.store_result
    assert job.sampling.max_tokens == SUMMARIES.session_summary_tokens
    assert job.messages is not None
    assert "User: question 0" in job.messages[0].content
    assert "Assistant: answer 0" in job.messages[0].content
    ready = len(front.model.tokenizer.encode_chat(job.messages)) + (job.sampling.max_tokens or 0)
    assert ready <= front.model.context_window_tokens

    # Nobody waits for it, and what is said meanwhile stays.
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
    await eventually(lambda: _is_gone(redis, session_summary_key("local", SESSION)))

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
    summariser.jobs.clear()
    await talk_until_summarised(front, summariser)
    messages = summariser.jobs[0].messages
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
    assert len(summariser.jobs) == 1


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
    assert len(summariser.jobs) == 1, "it is not tried again at once"


async def test_a_deleted_conversation_is_not_summarised(make: Make) -> None:
    summariser = Summariser()
    front = make(SUMMARIES, generate=summariser)
    await talk_until_summarised(front, summariser)
    await front.sessions.delete("local", SESSION)
    await front.exchange("new", "yes")
    summariser.gate.set()
    await eventually(lambda: not front.sessions.num_summarising)
    assert await front.texts() == ["new", "yes"]


async def test_a_tier_without_summaries(make: Make) -> None:
    front = make(SUMMARIES)
    free = Caller(tenant="local", tier=Tier.FREE)
    for number in range(20):
        request_id = f"r{number}"
        fitted = await front.begin(user(LONG), request_id=request_id, caller=free)
        await front.commit(assistant(LONG), request_id=request_id)
    assert fitted.info.num_dropped > 0


# --- over HTTP -------------------------------------------------------------------------------


@pytest.fixture
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async def refuse(_request: Request, error: Exception) -> Response:
        assert isinstance(error, MillraceError)
        refusal = refusal_of(error)
        return Response(refusal.body, refusal.status)

    app = Starlette(routes=SessionsApi(front).routes(), exception_handlers={MillraceError: refuse})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_reading_and_deleting_over_http(front: Front, http: httpx.AsyncClient) -> None:
    await front.exchange("q", "a")
    found = await http.get(f"/v1/sessions/{SESSION}")
    assert found.status_code == 200
    body = found.json()
    assert body["messages"] == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert (body["session_id"], body["version"], body["num_summarised"]) == (SESSION, 1, 0)
    assert 3_590 < body["expires_in_s"] <= 3_600

    gone = await http.delete(f"/v1/sessions/{SESSION}")
    assert gone.json() == {"id": SESSION, "object": "session", "deleted": True}
    for answer in (
        await http.get(f"/v1/sessions/{SESSION}"),
        await http.delete(f"/v1/sessions/{SESSION}"),
        await http.get("/v1/sessions/a%2Fb"),
        await http.get("/v1/sessions/" + "x" * 300),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "session_not_found"
    bad = await http.get(f"/v1/sessions/{SESSION}", headers={"authorization": "Bearer mr-x-y"})
    assert bad.status_code == 401
