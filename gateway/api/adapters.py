"""LoRA adapters over HTTP, for administrators: vLLM's two endpoints, and a list."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from millrace.bus.fleet.adapters import AdapterStore
from millrace.gateway.core import Gateway
from millrace.gateway.tenancy.identity import require_admin
from millrace.gateway.transport.http import json_response, read_body
from millrace.registry.adapters import AdapterOffer, check_offer, read_offer
from millrace.registry.requests.decoding import decode
from millrace.registry.rollouts.versions import split
from millrace.runtime.redis.link import reachable
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ParameterError
from millrace.schemas.models.adapters import (
    Adapter,
    AdapterList,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)


class AdaptersApi:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._load_decoder = msgspec.json.Decoder(LoadLoraAdapterRequest)
        self._unload_decoder = msgspec.json.Decoder(UnloadLoraAdapterRequest)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/adapters", self.adapters, methods=["GET"]),
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def adapters(self, request: Request) -> Response:
        """Every adapter, whoever it is for."""
        require_admin(await self._gateway.identity.caller(request.scope))
        return json_response(AdapterList(data=tuple(await self._store().all())))

    async def load(self, request: Request) -> Response:
        """Offer an adapter. It is checked here, and a worker loads it with its first request."""
        gateway = self._gateway
        require_admin(await gateway.identity.caller(request.scope))
        body = await read_body(request.scope, request.receive, gateway.config)
        asked = decode(self._load_decoder, body)
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
        """Offer an adapter no more."""
        gateway = self._gateway
        require_admin(await gateway.identity.caller(request.scope))
        body = await read_body(request.scope, request.receive, gateway.config)
        asked = decode(self._unload_decoder, body)
        await self._store().remove(asked.lora_name)
        await gateway.adapters.look()
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
