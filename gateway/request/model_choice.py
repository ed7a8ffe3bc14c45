"""Requests that leave the choice of a model, or of its version, to the gateway, and what their
callers are told of it."""

from __future__ import annotations

import uuid
from functools import partial

from msgspec.structs import replace

from millrace.gateway.models import LoadedModels
from millrace.gateway.sessions.sessions import Sessions
from millrace.gateway.streams.fleet_view import FleetView
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.rollouts.versions import REASON
from millrace.registry.routing.router import (
    Chosen,
    ModelState,
    RoutingQuestion,
    check_routable,
    question_of,
)
from millrace.schemas.jobs import Tier
from millrace.schemas.tools import ToolMode


class ModelChoice:
    """Puts a model in the place of a route's name, by what is asked and how the models stand, and a
    version in that of a name that stands for several, as rollouts say. A request that names a model
    is left as it is. Raises ParameterError for what no choice can be made of, ModelNotFoundError
    for a version that is not there."""

    def __init__(self, models: LoadedModels, fleet: FleetView, sessions: Sessions) -> None:
        self._models = models
        self._fleet = fleet
        self._sessions = sessions

    async def resolve(
        self,
        request: GenerationRequest,
        tenant: str,
        tier: Tier,
        former: str = "",
    ) -> GenerationRequest:
        """The request with a model and version, for ``tier``; one that has been here is left as it
        is. ``former`` answered the conversation so far; that of a session is looked up, which
        raises what reading a session raises. All of a session get the same version as long as
        shares stay."""
        if request.model_requested:
            return request
        chosen = await self._routed(request, tenant, tier, former)
        version = self._models.version(chosen.model, request.session_id or uuid.uuid4().hex)
        return chosen if version is None else _of_version(chosen, version)

    async def _routed(
        self, request: GenerationRequest, tenant: str, tier: Tier, former: str
    ) -> GenerationRequest:
        if request.model not in self._models.router.routes:
            adapter = await self._models.adapter(request.model, tenant)
            return request if adapter is None else replace(request, adapter=adapter)
        question = _question(request, tier)
        if request.session_id and request.session_keep != 0:
            former = await self._sessions.last_model(tenant, request.session_id)
        former = self._as_in_route(request.model, former)
        state_of = partial(self._state_of, tenant)
        return _with(request, self._models.router.choose(request.model, question, state_of, former))

    def resolve_alone(self, request: GenerationRequest, tier: Tier) -> GenerationRequest:
        """The request with the model that suits it, however the models stand just now, and its
        stable version: the same on every gateway, and at any time between rollouts."""
        if request.model in self._models.router.routes:
            question = _question(request, tier)
            chosen = self._models.router.choose(request.model, question, self._at_rest)
            request = _with(request, chosen)
        version = self._models.stable_version(request.model)
        return request if version is None else _of_version(request, version)

    def _as_in_route(self, name: str, former: str) -> str:
        """The model of a route that ``former`` is a version of."""
        family = self._models.family(former)
        return next((m for m in self._models.router.routes[name].models if m in family), former)

    def _state_of(self, tenant: str, model: str, tier: Tier) -> ModelState:
        """Of several versions the stable one's."""
        state = self._at_rest(model, tier)
        model = self._models.stable_version(model) or model
        workers = [one for one in self._fleet.live_workers(model) if not one.draining]
        queue = self._fleet.queue(model)
        if queue is None:
            return replace(state, num_workers=len(workers))
        return replace(
            state,
            num_workers=len(workers),
            ttft_ms=queue.ttft_ms_of(tier, tenant),
            is_full=queue.is_full,
        )

    def _at_rest(self, model: str, _tier: Tier) -> ModelState:
        window = self._models.card(model).max_model_len
        return ModelState(num_workers=1, context_window_tokens=window)


def route_headers(request: GenerationRequest) -> list[tuple[bytes, bytes]]:
    """What a response says of its model."""
    headers = [(b"x-millrace-model", request.model.encode())]
    if request.route_reason:
        headers.append((b"x-millrace-route-reason", request.route_reason.encode()))
    return headers


def _question(request: GenerationRequest, tier: Tier) -> RoutingQuestion:
    check_routable(
        request.model, (request.prompt_token_ids, *request.other_prompts), request.sampling
    )
    prompts = [
        request.prompt or "",
        *(one for one in request.other_prompts if isinstance(one, str)),
    ]
    has_tools = bool(request.tools or request.server_tools)
    return question_of(
        max(prompts, key=len),
        request.messages,
        request.sampling,
        tier,
        has_tools=has_tools and request.tool_choice.mode is not ToolMode.NONE,
    )


def _of_version(request: GenerationRequest, version: str) -> GenerationRequest:
    return replace(
        request,
        model=version,
        model_requested=request.model_requested or request.model,
        route_reason=request.route_reason or REASON,
    )


def _with(request: GenerationRequest, chosen: Chosen) -> GenerationRequest:
    return replace(
        request, model=chosen.model, model_requested=request.model, route_reason=chosen.reason
    )
