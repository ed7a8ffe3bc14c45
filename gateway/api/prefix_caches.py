"""``POST /reset_prefix_cache``: the prefix caches of a model's workers, for administrators."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import require_admin
from millrace.gateway.transport.http import json_response
from millrace.schemas.control import ResetPrefixCache, WorkerStatus
from millrace.schemas.errors import MillraceError, ParameterError, PrefixCacheKeptError

# By vLLM's name, then by SGLang's.
RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
_TIMEOUT_S = 10.0
_OFF = ("", "0", "false")
# Parameters of vLLM's path, of which only the default is honoured.
_UNHONOURED = ("reset_running_requests", "reset_external")


class ResetWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker whose prefix cache was emptied."""

    worker_id: str
    model: str


class PrefixCacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: all workers of the model, or of all models. Blocks that running requests use stay
    until these end."""

    workers: tuple[ResetWorker, ...]
    object: Literal["prefix_cache_reset"] = "prefix_cache_reset"


class PrefixCachesApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [Route(path, self.reset, methods=["POST"]) for path in RESET_PATHS]

    async def reset(self, request: Request) -> Response:
        """Empty the prefix caches of the workers of ``?model=``, or of all workers. Raises
        PrefixCacheKeptError if one of them cannot or does not answer."""
        gateway = self._gateway
        require_admin(await gateway.identity.caller(request.scope))
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
        """Return what went wrong; empty if nothing did."""
        name = f"worker {worker.worker_id} of {worker.model}"
        control = self._gateway.bus.control
        try:
            reply = await control.command(worker.worker_id, ResetPrefixCache(), _TIMEOUT_S)
        except MillraceError as error:
            return f"{name}: {error.message}"
        if reply is None:
            return f"{name} does not answer."
        return "" if reply.ok else f"{name}: {reply.message or reply.reason}"
