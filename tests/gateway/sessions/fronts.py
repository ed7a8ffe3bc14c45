"""Session parts of a gateway, without its sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from millrace.gateway.models import LoadedModels
from millrace.gateway.sessions.sessions import FittedSession, Sessions
from millrace.gateway.sessions.summaries import Generate
from millrace.gateway.tenancy.identity import LOCAL, Caller, Identity
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.runtime.clock import Clock, SystemClock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig, SessionContexts
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.sampling import SamplingParams

MODEL = "demo"
SESSION = "s-1"
NO_SUMMARIES = SessionContexts(pro="window", enterprise="window")
SUMMARIES = GatewayConfig(session_context=SessionContexts(free="window"))
# Half a hundred tokens of the demo model's.
LONG = "The gateway sends tokens to the client as they come, and the worker makes them. " * 3

Make = Callable[..., "Front"]


async def no_summary(_tenant: str, _request_id: str, _request: GenerationRequest) -> str:
    raise AssertionError("nothing asked for a summary")


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


class Front:
    """Session parts of a gateway, on a separate Redis link."""

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
        models = LoadedModels({MODEL: card}, lambda _name: model)
        self.prompts = PromptPool()
        self.sessions = Sessions(
            self.link, config, clock, models, generate, lambda _names: (), self.prompts
        )
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
        request = GenerationRequest(
            model=MODEL,
            messages=messages,
            sampling=SamplingParams(max_tokens=max_tokens),
            session_id=session_id,
            session_keep=keep,
        )
        return await self.sessions.open_turn(caller, request, self.model, request_id or "r")

    async def commit(
        self, *answer: ChatMessage, request_id: str = "", tenant: str = "local"
    ) -> None:
        await self.sessions.commit_turn(tenant, SESSION, request_id or "r", answer)

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


async def is_gone(redis: Redis, key: str) -> bool:
    """Return whether the key does not exist in Redis."""
    return not await redis.exists(key)
