"""Rollouts of versions over HTTP, for administrators."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.bus.fleet.rollouts import RolloutStore
from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import require_admin
from millrace.gateway.transport.http import json_response, read_body
from millrace.registry.requests.decoding import decode
from millrace.registry.rollouts.decisions import begin, returned
from millrace.runtime.redis.link import reachable
from millrace.schemas.models.rollouts import (
    RolloutList,
    RolloutNotFoundError,
    RolloutReport,
    StartRolloutRequest,
)


class RolloutsApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = msgspec.json.Decoder(StartRolloutRequest)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/rollouts", self.rollouts, methods=["GET"]),
            Route("/v1/rollouts", self.start, methods=["POST"]),
            Route("/v1/rollouts/{model:path}/rollback", self.roll_back, methods=["POST"]),
            Route("/v1/rollouts/{model:path}", self.rollout, methods=["GET"]),
        ]

    async def rollouts(self, request: Request) -> Response:
        """The latest of each model."""
        require_admin(await self._gateway.identity.caller(request.scope))
        return json_response(RolloutList(data=tuple(await self._store().reports())))

    async def rollout(self, request: Request) -> Response:
        """The latest of one model. Raises RolloutNotFoundError."""
        require_admin(await self._gateway.identity.caller(request.scope))
        model = request.path_params["model"]
        report = await self._store().report(model)
        if report is None:
            raise RolloutNotFoundError(model)
        return json_response(report)

    async def start(self, request: Request) -> Response:
        """Begin to move a model's traffic to another version of it. Raises ParameterError,
        ModelNotFoundError, RolloutConflictError."""
        gateway = self._gateway
        require_admin(await gateway.identity.caller(request.scope))
        body = await read_body(request.scope, request.receive, gateway.config)
        asked = decode(self._decoder, body)
        store = self._store()
        known = {one.model: one for one in await store.all()}
        begun = begin(asked, gateway.models.names(), known, gateway.clock.now_ns())
        rollout = await store.start(begun, known.get(begun.model))
        await gateway.rollouts.look()
        return json_response(RolloutReport(rollout=rollout))

    async def roll_back(self, request: Request) -> Response:
        """Give all of a model's traffic back to the version that had it before. Raises
        RolloutNotFoundError, RolloutConflictError."""
        gateway = self._gateway
        require_admin(await gateway.identity.caller(request.scope))
        model, now_ns = request.path_params["model"], gateway.clock.now_ns()
        names = gateway.models.names()
        rollout = await self._store().apply(model, lambda known: returned(known, names, now_ns))
        await gateway.rollouts.look()
        return json_response(RolloutReport(rollout=rollout))

    def _store(self) -> RolloutStore:
        return RolloutStore(reachable(self._gateway.redis))
