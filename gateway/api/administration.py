"""Administration endpoints: LoRA adapters, rollouts of versions, prefix caches."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from millrace.bus.fleet.adapters import AdapterStore
from millrace.bus.fleet.rollouts import RolloutStore
from millrace.gateway.api.rest import RestApi
from millrace.gateway.transport.http import json_response
from millrace.registry.adapters import AdapterOffer, check_offer, read_offer
from millrace.registry.rollouts.decisions import begin, returned
from millrace.registry.rollouts.versions import split
from millrace.runtime.redis.link import reachable
from millrace.schemas.control import ResetPrefixCache, WorkerStatus
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import MillraceError, ParameterError, PrefixCacheKeptError
from millrace.schemas.models.adapters import (
    Adapter,
    AdapterList,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from millrace.schemas.models.rollouts import (
    RolloutList,
    RolloutNotFoundError,
    RolloutReport,
    StartRolloutRequest,
)

# vLLM's name, then SGLang's.
RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
_TIMEOUT_S = 10.0
_OFF = ("", "0", "false")
# Parameters of vLLM's path. Only their default values are accepted.
_UNHONOURED = ("reset_running_requests", "reset_external")


class AdaptersApi(RestApi):
    """LoRA adapter endpoints: vLLM's two endpoints, and a list."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/adapters", self.adapters, methods=["GET"]),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def adapters(self, request: Request) -> Response:
        """List the adapters of all tenants."""
        await self._admin(request)
        return json_response(AdapterList(data=tuple(await self._store().all())))

    async def load(self, request: Request) -> Response:
        """Offer an adapter after checking it here. A worker loads it with its first request."""
        gateway = self._gateway
        await self._admin(request)
        asked = await self._read(request, LoadLoraAdapterRequest)
        card = gateway.models.card(self._base_of(asked))
        if card.id not in gateway.models.names():
            raise ParameterError(
                "base_model_name", f"{card.id} stands for several models; name one of them."
            )
        engine = EngineKind.REAL if card.engine is None else EngineKind(card.engine.kind)
        offer = AdapterOffer(
            name=asked.lora_name,
            model=card.id,
            source=asked.lora_path,
            tenants=asked.tenants,
            description=asked.description,
            prices=asked.prices,
        )
        names = gateway.models.names()
        several = (split(name)[0] for name in names)
        taken = {*names, *several, *gateway.models.router.routes}
        model = await gateway.models.get(card.id)
        now_ns = gateway.clock.now_ns()

        def read() -> Adapter:
            folder = check_offer(offer, engine, taken, model.prices)
            return read_offer(offer, folder, model.adapter_outline(folder), now_ns)

        adapter = await asyncio.to_thread(read)
        await self._store().add(adapter, replace=asked.load_inplace)
        await gateway.adapters.look()
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Withdraw an adapter."""
        await self._admin(request)
        asked = await self._read(request, UnloadLoraAdapterRequest)
        await self._store().remove(asked.lora_name)
        await self._gateway.adapters.look()
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _base_of(self, asked: LoadLoraAdapterRequest) -> str:
        if asked.base_model_name is not None:
            return asked.base_model_name
        names = self._gateway.models.names()
        if len(names) != 1:
            raise ParameterError(
                "base_model_name",
                f"There are several models; name the adapter's: {', '.join(names)}.",
            )
        return names[0]

    def _store(self) -> AdapterStore:
        return AdapterStore(reachable(self._gateway.redis))


class RolloutsApi(RestApi):
    """Rollout endpoints."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/rollouts", self.rollouts, methods=["GET"]),
            Route("/v1/rollouts", self.start, methods=["POST"]),
            Route("/v1/rollouts/{model:path}/rollback", self.roll_back, methods=["POST"]),
            Route("/v1/rollouts/{model:path}", self.rollout, methods=["GET"]),
        ]

    async def rollouts(self, request: Request) -> Response:
        """List the latest rollout of each model."""
        await self._admin(request)
        return json_response(RolloutList(data=tuple(await self._store().reports())))

    async def rollout(self, request: Request) -> Response:
        """Return the latest rollout of one model. Raises RolloutNotFoundError."""
        await self._admin(request)
        model = request.path_params["model"]
        report = await self._store().report(model)
        if report is None:
            raise RolloutNotFoundError(model)
        return json_response(report)

    async def start(self, request: Request) -> Response:
        """Begin to move a model's traffic to another version of it.

        Raises ParameterError, ModelNotFoundError or RolloutConflictError.
        """
        gateway = self._gateway
        await self._admin(request)
        asked = await self._read(request, StartRolloutRequest)
        store = self._store()
        known = {one.model: one for one in await store.all()}
        begun = begin(asked, gateway.models.names(), known, gateway.clock.now_ns())
        rollout = await store.start(begun, known.get(begun.model))
        await gateway.rollouts.look()
        return json_response(RolloutReport(rollout=rollout))

    async def roll_back(self, request: Request) -> Response:
        """Give all of a model's traffic back to the previous version.

        Raises RolloutNotFoundError or RolloutConflictError.
        """
        gateway = self._gateway
        await self._admin(request)
        model, now_ns = request.path_params["model"], gateway.clock.now_ns()
        names = gateway.models.names()
        rollout = await self._store().apply(model, lambda known: returned(known, names, now_ns))
        await gateway.rollouts.look()
        return json_response(RolloutReport(rollout=rollout))

    def _store(self) -> RolloutStore:
        return RolloutStore(reachable(self._gateway.redis))


class ResetWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Worker with an emptied prefix cache."""

    worker_id: str
    model: str


class PrefixCacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for all workers of the model, or of all models. Blocks in use stay cached until the
    running requests end.
    """

    workers: tuple[ResetWorker, ...]
    object: Literal["prefix_cache_reset"] = "prefix_cache_reset"


class PrefixCachesApi(RestApi):
    """Endpoint ``POST /reset_prefix_cache`` for the prefix caches of a model's workers."""

    def routes(self) -> list[Route]:
        return [Route(path, self.reset, methods=["POST"]) for path in RESET_PATHS]

    async def reset(self, request: Request) -> Response:
        """Empty the prefix caches of the workers of ``?model=``, or of all workers.

        Raises PrefixCacheKeptError if a worker cannot reset its cache or does not answer.
        """
        gateway = self._gateway
        await self._admin(request)
        for name in _UNHONOURED:
            if request.query_params.get(name, "").lower() not in _OFF:
                raise ParameterError(name, f"{name} is not supported; leave it out.")
        workers = gateway.fleet.live_workers()
        model = request.query_params.get("model")
        if model is not None:
            card = gateway.models.card(model)
            names = {card.id, *card.versions}
            workers = [worker for worker in workers if worker.model in names]
        failures = await asyncio.gather(*map(self._reset, workers))
        told = "; ".join(failure for failure in failures if failure)
        if told:
            raise PrefixCacheKeptError(f"Not every prefix cache was emptied: {told:.1000}")
        reset = (ResetWorker(worker_id=one.worker_id, model=one.model) for one in workers)
        return json_response(PrefixCacheReset(workers=tuple(reset)))

    async def _reset(self, worker: WorkerStatus) -> str:
        """Return the reason of a failed reset; empty on success."""
        name = f"worker {worker.worker_id} of {worker.model}"
        control = self._gateway.bus.control
        try:
            reply = await control.command(worker.worker_id, ResetPrefixCache(), _TIMEOUT_S)
        except MillraceError as error:
            return f"{name}: {error.message}"
        if reply is None:
            return f"{name} does not answer."
        return "" if reply.ok else f"{name}: {reply.message or reply.reason}"
