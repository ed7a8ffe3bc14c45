"""Choice of a model or version for requests that leave it to the gateway, and its headers."""

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
    """Chooser of models and versions. It replaces a route's name by a model, according to the
    request and the state of the models, and a name of several versions by a version, according to
    rollouts. A request that names a model stays unchanged.

    Raises ParameterError if no choice is possible, ModelNotFoundError for a missing version.
    """

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
        """Return the request with a model and version, for ``tier``. A resolved request stays
        unchanged. ``former`` is the model that answered the conversation so far; a session's model
        is looked up, with the errors of reading a session. All requests of a session get the same
        version as long as the rollout's shares stay.
        """
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
        """Return the request with the model that suits it, independent of the models' load, and its
        stable version: the same on every gateway, and at any time between rollouts.
        """
        if request.model in self._models.router.routes:
            question = _question(request, tier)
            chosen = self._models.router.choose(request.model, question, self._at_rest)
            request = _with(request, chosen)
        version = self._models.stable_version(request.model)
        return request if version is None else _of_version(request, version)

    def _as_in_route(self, name: str, former: str) -> str:
        """Return the route's model of which ``former`` is a version, else ``former``."""
        family = self._models.family(former)
        return next((m for m in self._models.router.routes[name].models if m in family), former)

    def _state_of(self, tenant: str, model: str, tier: Tier) -> ModelState:
        """Return the state of a model; of several versions, the stable version's."""
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
    """Return the headers about a response's model."""
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
