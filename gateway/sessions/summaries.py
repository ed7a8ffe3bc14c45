"""Summaries of the oldest turns of long conversations, made in the background."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec.structs import replace

from millrace.gateway.sessions.context_window import Counted, text_of, turns
from millrace.gateway.sessions.store import Session, SessionStore, Turn
from millrace.gateway.transport.http import new_request_id
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.sampling import SamplingOptions

_log = logging.getLogger(__name__)

_MAX_AT_ONCE = 32
_MAX_ATTEMPTS = 16
_LOCK_MARGIN_S = 30.0
# Pause after a failure, which would otherwise repeat with the next answer.
_PAUSE_S = 60.0
# Share of the bound for messages that stay unchanged, and share of the window that may be
# summarised at once. The template and the instruction take the rest.
_KEPT_SHARE = 0.5
_READ_SHARE = 0.75
# Speaker and an empty line.
_LINE_TOKENS = 8
_WORDS_PER_TOKEN = 0.6
_SPEAKERS = {"user": "User", "assistant": "Assistant", "tool": "Tool"}

_INSTRUCTION = (
    "Sum up the conversation below, so that its assistant can go on with it without reading it "
    "again. Keep names, numbers, decisions, open questions and what the user wants. Write plain "
    "text of at most {num_words} words and nothing else."
)

# Tenant, request id, and the request to generate.
Generate = Callable[[str, str, GenerationRequest], Awaitable[str]]


class _Plan(NamedTuple):
    """Messages to summarise, by their indices, and all messages up to the last of them."""

    indices: frozenset[int]
    prefix: tuple[Counted, ...]


class Summaries:
    """Summariser of conversations. At most one summary of a conversation is made at a time, across
    all gateways. No request waits for it, and if it fails the conversation stays unchanged.

    ``generate`` returns the text of a request, or raises MillraceError. Owns the tasks that wait
    for it; ``close`` ends them.
    """

    def __init__(self, store: SessionStore, config: GatewayConfig, generate: Generate) -> None:
        self._store = store
        self._config = config
        self._generate = generate
        self._under_way: set[tuple[str, str]] = set()
        self._tasks = Tasks()

    def consider(self, tenant: str, session_id: str, session: Session, turn: Turn) -> None:
        """Begin a summary if the policy of the turn's caller allows it and the conversation with
        the new turn is long enough.
        """
        if getattr(self._config.session_context, turn.tier.value) != "summary":
            return
        key = (tenant, session_id)
        if key in self._under_way or len(self._under_way) >= _MAX_AT_ONCE:
            return
        plan = self._plan(session, turn)
        if plan is None:
            return
        self._under_way.add(key)
        work = self._run(tenant, session_id, session, turn, plan)
        self._tasks.spawn(work, "summarise a session")

    async def close(self) -> None:
        """Cancel running tasks."""
        await self._tasks.close()

    def _plan(self, session: Session, turn: Turn) -> _Plan | None:
        """Choose the oldest whole turns, so many that the remaining ones take half of their bound;
        never the newest turn. Return None if there is no need, or if no turn fits one request.
        """
        messages = session.messages
        bound = self._config.session_summary_share * turn.window_tokens
        num_left = sum(one.num_tokens for one in messages)
        if num_left <= bound:
            return None
        room = _READ_SHARE * turn.window_tokens - 2 * self._config.session_summary_tokens
        chosen: list[int] = []
        for indices in turns([one.message for one in messages])[:-1]:
            num_tokens = sum(messages[index].num_tokens for index in indices)
            num_read = num_tokens + _LINE_TOKENS * len(indices)
            if num_left <= _KEPT_SHARE * bound or num_read > room:
                break
            room -= num_read
            num_left -= num_tokens
            chosen += indices
        if not chosen:
            return None
        return _Plan(frozenset(chosen), messages[: chosen[-1] + 1])

    async def _run(
        self, tenant: str, session_id: str, session: Session, turn: Turn, plan: _Plan
    ) -> None:
        lock_s = self._config.request_timeout_s + _LOCK_MARGIN_S
        try:
            if not await self._store.lock_summary(tenant, session_id, lock_s):
                return
            is_done = await self._summarise(tenant, session_id, session, turn, plan)
            await self._store.unlock_summary(tenant, session_id, 0.0 if is_done else _PAUSE_S)
        except RedisUnreachableError:
            _log.info("Redis became unreachable during a summary of a session")
        finally:
            self._under_way.discard((tenant, session_id))

    async def _summarise(
        self, tenant: str, session_id: str, session: Session, turn: Turn, plan: _Plan
    ) -> bool:
        """Summarise; return False if a retry would fail again."""
        request_id = new_request_id("sum")
        request = self._request(session_id, session, turn, plan)
        try:
            summary = (await self._generate(tenant, request_id, request)).strip()
        except MillraceError as error:
            _log.warning(
                "a session was not summarised",
                extra={"request_id": request_id, "code": error.code},
            )
            return False
        if not summary:
            return False
        for _ in range(_MAX_ATTEMPTS):
            # Turns that came meanwhile stay; so does a conversation that was replaced.
            now = await self._store.load(tenant, session_id)
            is_same = now.num_summarised == session.num_summarised
            if not is_same or now.messages[: len(plan.prefix)] != plan.prefix:
                return True
            kept = (one for index, one in enumerate(now.messages) if index not in plan.indices)
            shorter = replace(
                now,
                messages=tuple(kept),
                summary=summary,
                num_summarised=now.num_summarised + len(plan.indices),
            )
            if await self._store.replace(tenant, session_id, shorter):
                return True
        return True

    def _request(
        self, session_id: str, session: Session, turn: Turn, plan: _Plan
    ) -> GenerationRequest:
        max_tokens = self._config.session_summary_tokens
        text = [_INSTRUCTION.format(num_words=round(max_tokens * _WORDS_PER_TOKEN))]
        if session.summary:
            text.append(f"What went before: {session.summary}")
        text += [_line(session.messages[index].message) for index in sorted(plan.indices)]
        return GenerationRequest(
            model=turn.model,
            # One user message: some templates take nothing else.
            messages=(ChatMessage("user", "\n\n".join(text)),),
            sampling=SamplingOptions(max_tokens=max_tokens, temperature=0.0),
            session_id=session_id,
        )


def _line(message: ChatMessage) -> str:
    speaker = _SPEAKERS.get(message.role, message.role)
    return f"{speaker}: {text_of(message)}"
