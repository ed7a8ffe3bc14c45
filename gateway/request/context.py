"""What answers need of the gateway's other parts."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Protocol

import msgspec

from gateway.request.models import ServedModelLike
from gateway.request.parsing import Ask
from gateway.tenancy.caller import Caller
from schemas.frames import Usage
from schemas.jobs import ChatMessage, Tier
from schemas.sessions import SessionInfo
from schemas.tools import ToolDefinition


class ReservationLike(Protocol):
    """What was taken out of a caller's limits; ``headers`` tell the caller what is left."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...


class LimiterLike(Protocol):
    """``gateway.tenancy.limits.Limiter``."""

    async def reserve(
        self,
        caller: Caller,
        request_id: str,
        *,
        model: str,
        tier: Tier | None = None,
        num_prompt_tokens: int,
        max_tokens: int,
        cost_upper: Decimal,
        deadline_s: float,
        longest_tokens: int | None = None,
    ) -> ReservationLike: ...

    async def settle(self, request_id: str, usage: Usage | None, cost: Decimal | None) -> bool: ...

    def settle_soon(self, request_id: str, usage: Usage | None, cost: Decimal | None) -> None: ...


class FittedSessionLike(Protocol):
    """A conversation as it goes into the prompt."""

    @property
    def messages(self) -> tuple[ChatMessage, ...]: ...

    @property
    def info(self) -> SessionInfo: ...


class SessionsLike(Protocol):
    """``gateway.sessions.sessions.Sessions``."""

    async def begin(
        self, caller: Caller, ask: Ask, model: ServedModelLike, request_id: str
    ) -> FittedSessionLike: ...

    async def last_model(self, tenant: str, session_id: str) -> str: ...

    async def abandon(self, tenant: str, session_id: str, request_id: str) -> None: ...

    async def commit(
        self, tenant: str, session_id: str, request_id: str, turns: Sequence[ChatMessage]
    ) -> None: ...


class ToolResultLike(Protocol):
    """What a tool gave, or the error that the model is told."""

    @property
    def ok(self) -> bool: ...

    @property
    def output(self) -> str: ...

    @property
    def duration_ms(self) -> float: ...


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's result as it is remembered."""

    ok: bool
    output: str
    duration_ms: float


class ToolsLike(Protocol):
    """``gateway.tools.runner.ToolRunner``."""

    def definitions(self, names: Sequence[str]) -> tuple[ToolDefinition, ...]: ...

    async def run(self, name: str, arguments: str) -> ToolResultLike: ...
