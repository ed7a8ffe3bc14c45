"""Asks that leave the choice of a model to the gateway, and what their callers are told of it."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from gateway.request.context import SessionsLike
from gateway.request.models import Models
from gateway.request.parsing import Ask
from gateway.streams.fleet import Fleet
from registry.routing.router import Chosen, ModelState, check_routable
from registry.routing.score import Question, question_of
from schemas.jobs import Tier
from schemas.tools import ToolMode


class ModelChoice:
    """Puts a model in the place of a route's name, by what is asked and how the models stand. An
    ask that names a model is left as it is. Raises ParameterError for what no choice can be made
    of."""

    def __init__(self, models: Models, fleet: Fleet, sessions: SessionsLike) -> None:
        self._models = models
        self._router = models.router
        self._fleet = fleet
        self._sessions = sessions

    async def resolve(self, ask: Ask, tenant: str, tier: Tier, former: str = "") -> Ask:
        """The ask with a model, for a request of ``tier``. ``former`` answered the conversation so
        far; that of a session is looked up, which raises what reading a session raises."""
        if ask.model not in self._router.routes:
            return ask
        question = _question(ask, tier)
        if ask.session_id and ask.session_keep != 0:
            former = await self._sessions.last_model(tenant, ask.session_id)
        state_of = partial(self._state_of, tenant)
        return _with(ask, self._router.choose(ask.model, question, state_of, former))

    def resolve_alone(self, ask: Ask, tier: Tier) -> Ask:
        """The ask with the model that suits it, however the models stand just now: the same on
        every gateway, at any time."""
        if ask.model not in self._router.routes:
            return ask
        return _with(ask, self._router.choose(ask.model, _question(ask, tier), self._at_rest))

    def _state_of(self, tenant: str, model: str, tier: Tier) -> ModelState:
        state = self._at_rest(model, tier)
        workers = [one for one in self._fleet.live_workers(model) if not one.draining]
        queue = self._fleet.queue(model)
        if queue is None:
            return replace(state, num_workers=len(workers))
        return replace(
            state,
            num_workers=len(workers),
            ttft_ms=queue.ttft_ms_of(tier, tenant),
            is_full=queue.num_queued >= queue.bound,
        )

    def _at_rest(self, model: str, _tier: Tier) -> ModelState:
        window = self._models.card(model).max_model_len
        return ModelState(num_workers=1, context_window_tokens=window)


def route_headers(ask: Ask) -> list[tuple[bytes, bytes]]:
    """What a response says of its model."""
    headers = [(b"x-millrace-model", ask.model.encode())]
    if ask.route_reason:
        headers.append((b"x-millrace-route-reason", ask.route_reason.encode()))
    return headers


def _question(ask: Ask, tier: Tier) -> Question:
    check_routable(ask.model, (ask.prompt_token_ids, *ask.other_prompts), ask.sampling)
    prompts = [ask.prompt or "", *(one for one in ask.other_prompts if isinstance(one, str))]
    has_tools = bool(ask.tools or ask.server_tools)
    return question_of(
        max(prompts, key=len),
        ask.messages,
        ask.sampling,
        tier,
        has_tools=has_tools and ask.tool_choice.mode is not ToolMode.NONE,
    )


def _with(ask: Ask, chosen: Chosen) -> Ask:
    return replace(ask, model=chosen.model, model_requested=ask.model, route_reason=chosen.reason)
