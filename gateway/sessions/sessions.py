"""Sessions: stored conversations that are put before a request's messages and extended by its
turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from millrace.gateway.models import LoadedModels, ServedModelLike
from millrace.gateway.sessions.context_window import (
    Counted,
    Fitted,
    Window,
    continue_with,
    count_for,
    fit,
    window_of,
)
from millrace.gateway.sessions.store import COMMIT_TIMEOUT_S, Session, SessionStore, Turn
from millrace.gateway.sessions.summaries import Generate, Summaries
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.runtime.clock import Clock
from millrace.runtime.redis.link import RedisLink, RedisUnreachableError
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.sessions import SessionHistory, SessionInfo
from millrace.schemas.tools import ToolDefinition

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_MAX_LATE_COMMITS = 1_000

Definitions = Callable[[Sequence[str]], Sequence[ToolDefinition]]


class SessionNotFoundError(MillraceError, code="session_not_found", http_status=404):
    """Session that does not exist, or has expired."""

    param = "session_id"

    def __init__(self) -> None:
        super().__init__("There is no such session; it may have expired or been deleted.")


class FittedSession(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt of a request that continues a conversation, and the data about omitted messages."""

    messages: tuple[ChatMessage, ...]
    info: SessionInfo


class Sessions:
    """Sessions of one gateway. Call ``open_turn`` before a request's jobs are made and
    ``commit_turn`` when it is answered, on this gateway or another. Without a link all but
    ``commit_turn`` raise RedisUnreachableError.

    ``generate`` answers the requests that summarise; ``definitions`` describes the gateway's own
    tools by their names. Owns the commits that wait for Redis and the running summaries; ``close``
    ends them.
    """

    def __init__(
        self,
        link: RedisLink | None,
        config: GatewayConfig,
        clock: Clock,
        models: LoadedModels,
        generate: Generate,
        definitions: Definitions,
        prompts: PromptPool,
    ) -> None:
        self._store = SessionStore(link, config, clock)
        self._config = config
        self._clock = clock
        self._models = models
        self._definitions = definitions
        self._prompts = prompts
        self._summaries = Summaries(self._store, config, generate)
        self._late = Tasks()

    async def open_turn(
        self, caller: Caller, request: GenerationRequest, model: ServedModelLike, request_id: str
    ) -> FittedSession:
        """Put the stored conversation before the messages of ``request``, and store the request's
        addition.

        Raises RedisUnreachableError, ParameterError for a request that cannot continue a
        conversation, SessionTooLargeError and SessionUnreadableError.
        """
        if request.messages is None:
            raise ParameterError("session_id", "session_id goes with messages, not with a prompt.")
        session = await self._store.load(caller.tenant, request.session_id, renew=True)
        _check_keep(session, request.session_keep)
        base = session.cut(request.session_keep)
        window = window_of(request, model, caller, self._config.session_reserve_tokens)
        turn = Turn(
            base_version=session.version,
            keep=request.session_keep,
            messages=tuple(Counted(message) for message in request.messages),
            model=request.model,
            window_tokens=window.num_tokens,
            tier=caller.tier,
        )
        self._store.check_room(session, turn)
        tools = (*request.tools, *self._definitions(request.server_tools))
        turn, fitted = await self._fit(caller.tenant, base, turn, window, model, tools)
        await self._store.put_turn(caller.tenant, request.session_id, request_id, turn)
        num_summarised = base.num_summarised if fitted.with_summary else 0
        info = SessionInfo(
            session_id=request.session_id,
            version=session.version,
            num_messages=base.num_messages,
            num_dropped=fitted.num_dropped + base.num_summarised - num_summarised,
            num_summarised=num_summarised,
        )
        return FittedSession(messages=fitted.messages, info=info)

    async def abandon_turn(self, tenant: str, session_id: str, request_id: str) -> None:
        """Discard the addition of a request that was refused after ``open_turn``."""
        try:
            await self._store.drop_turn(tenant, session_id, request_id)
        except RedisUnreachableError:
            return  # No request will add it, and it expires.

    async def commit_turn(
        self, tenant: str, session_id: str, request_id: str, turns: Sequence[ChatMessage]
    ) -> None:
        """Add the request's messages and its answer, once, even if called repeatedly.

        An empty answer adds nothing. Never raises for Redis: while it is unreachable, the turn is
        added later.
        """
        answer = [turn for turn in turns if turn.role != "assistant" or _says_something(turn)]
        if not any(turn.role == "assistant" for turn in answer):
            return
        try:
            await self._commit(tenant, session_id, request_id, answer)
        except MillraceError as error:
            if not error.retryable or len(self._late) >= _MAX_LATE_COMMITS:
                _lost(request_id, error)
                return
            work = self._commit_later(tenant, session_id, request_id, answer)
            self._late.spawn(work, "add a turn to its session")

    async def last_model(self, tenant: str, session_id: str) -> str:
        """Return the last model of a conversation; empty if there is none. Raises
        SessionUnreadableError and RedisUnreachableError.
        """
        session = await self._store.load(tenant, session_id)
        return session.messages[-1].model if session.messages else ""

    async def history(self, tenant: str, session_id: str) -> SessionHistory:
        """Return the stored conversation. Raises SessionNotFoundError, SessionUnreadableError and
        RedisUnreachableError.
        """
        session = await self._store.load(tenant, session_id)
        if not session.num_messages:
            raise SessionNotFoundError
        return SessionHistory(
            session_id=session_id,
            version=session.version,
            messages=tuple(one.message for one in session.messages),
            summary=session.summary,
            num_summarised=session.num_summarised,
            expires_in_s=session.expires_in_s,
        )

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete a conversation, and the additions of running requests. Raises SessionNotFoundError
        and RedisUnreachableError.
        """
        if not await self._store.delete(tenant, session_id):
            raise SessionNotFoundError

    async def close(self) -> None:
        """Cancel running tasks."""
        await self._late.close()
        await self._summaries.close()

    async def _commit(
        self, tenant: str, session_id: str, request_id: str, answer: Sequence[ChatMessage]
    ) -> None:
        turn = await self._store.turn(tenant, session_id, request_id)
        if turn is None:
            return
        counted = await self._counted(tenant, [Counted(message) for message in answer], turn.model)
        turn = replace(turn, messages=(*turn.messages, *counted))
        session = await self._store.append(tenant, session_id, turn, request_id)
        if session is not None:
            self._summaries.consider(tenant, session_id, session, turn)

    async def _commit_later(
        self, tenant: str, session_id: str, request_id: str, answer: Sequence[ChatMessage]
    ) -> None:
        give_up_s = self._clock.monotonic() + COMMIT_TIMEOUT_S
        while True:
            await self._clock.sleep(_RETRY_S)
            try:
                await self._commit(tenant, session_id, request_id, answer)
            except MillraceError as error:
                if error.retryable and self._clock.monotonic() < give_up_s:
                    continue
                _lost(request_id, error)
            return

    async def _counted(
        self, tenant: str, messages: Sequence[Counted], name: str
    ) -> Sequence[Counted]:
        """Return the messages with token counts. Without the model here, return them unchanged:
        they are counted when needed.
        """
        try:
            model = await self._models.get(name, tenant)
        except MillraceError as error:
            _log.warning("tokens were not counted", extra={"model": name, "code": error.code})
            return messages
        num_characters = sum(len(one.message.content) for one in messages)
        return await self._prompts.run(
            tenant, num_characters, partial(count_for, model, name, messages)
        )

    async def _fit(
        self,
        tenant: str,
        base: Session,
        turn: Turn,
        window: Window,
        model: ServedModelLike,
        tools: Sequence[ToolDefinition],
    ) -> tuple[Turn, Fitted]:
        """Return the turn, counted, and its prompt."""

        def work() -> tuple[Turn, Fitted]:
            tokenizer = model.tokenizer
            counted = replace(turn, messages=count_for(model, turn.model, turn.messages))
            history, new = continue_with(base.messages, counted.messages)
            return counted, fit(
                count_for(model, turn.model, history),
                new,
                base.summary,
                window,
                lambda messages: tokenizer.encode_chat(messages, tools),
            )

        num_characters = sum(len(one.message.content) for one in (*base.messages, *turn.messages))
        return await self._prompts.run(tenant, num_characters, work)


def _check_keep(session: Session, keep: int | None) -> None:
    """Raise ParameterError if the first ``keep`` messages can no longer be told apart."""
    if keep is None or keep == 0:
        return
    if keep < 0:
        raise ParameterError("session_keep", f"session_keep must be at least 0, got {keep}.")
    if keep < session.least_keep:
        raise ParameterError(
            "session_keep",
            f"The first {session.least_keep} messages of this session were summarised and cannot "
            f"be told apart any more; keep at least {session.least_keep}, or 0.",
        )


def _says_something(message: ChatMessage) -> bool:
    return bool(message.content or message.tool_calls)


def _lost(request_id: str, error: MillraceError) -> None:
    _log.error("a turn was not stored", extra={"request_id": request_id, "code": error.code})
