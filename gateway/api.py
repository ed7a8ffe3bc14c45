"""The endpoints beside the token path: models, tokenize, health, metrics."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core import Gateway
from gateway.http import json_response, read_body
from gateway.message_fields import chat_messages
from gateway.parsing import decode
from registry.served import MAX_INLINE_CHARACTERS
from schemas.errors import ParameterError
from schemas.jobs import Tier
from schemas.openai import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from schemas.tenants import lower_limit

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Api:
    """Starlette endpoints over one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
        self._detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
            Route("/healthz", self.healthz, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        await self._gateway.identity.caller(request.scope)
        cards = map(self._with_tiers, self._gateway.models.cards())
        return json_response(ModelList(data=tuple(cards)))

    async def model(self, request: Request) -> Response:
        await self._gateway.identity.caller(request.scope)
        card = self._gateway.models.card(request.path_params["name"])
        return json_response(self._with_tiers(card))

    def _with_tiers(self, card: ModelCard) -> ModelCard:
        """The card with what of the model's window each tier may have."""
        tiers = self._gateway.config.tiers
        windows = {
            tier.value: lower_limit(card.max_model_len, tiers.of(tier).context_tokens)
            for tier in Tier
        }
        return msgspec.structs.replace(card, tier_context_tokens=windows)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt, or of messages as the chat template renders them."""
        await self._gateway.identity.caller(request.scope)
        body = await read_body(request.scope, request.receive, self._gateway.config.max_body_bytes)
        asked = decode(self._tokenize_decoder, body)
        if (asked.prompt is None) == (asked.messages is None):
            raise ParameterError("prompt", "Give exactly one of prompt and messages.")
        model = await self._gateway.models.get(asked.model)
        tokenizer = model.tokenizer
        if asked.messages is not None:
            messages = chat_messages(asked.messages)
            tokens = await asyncio.to_thread(tokenizer.encode_chat, messages)
        elif len(asked.prompt or "") > MAX_INLINE_CHARACTERS:
            tokens = await asyncio.to_thread(
                tokenizer.encode, asked.prompt or "", asked.add_special_tokens
            )
        else:
            tokens = tokenizer.encode(asked.prompt or "", asked.add_special_tokens)
        answer = TokenizeResponse(
            tokens=tuple(tokens), count=len(tokens), max_model_len=model.context_window_tokens
        )
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids; bytes that are no whole character show as U+FFFD."""
        await self._gateway.identity.caller(request.scope)
        body = await read_body(request.scope, request.receive, self._gateway.config.max_body_bytes)
        asked = decode(self._detokenize_decoder, body)
        model = await self._gateway.models.get(asked.model)
        for token_id in asked.tokens:
            if not 0 <= token_id < model.vocab_size:
                raise ParameterError(
                    "tokens",
                    f"{token_id} is no token id: this model's are 0 to {model.vocab_size - 1}.",
                )
        decoding = partial(
            model.tokenizer.decode, asked.tokens, skip_special_tokens=asked.skip_special_tokens
        )
        is_long = len(asked.tokens) > MAX_INLINE_CHARACTERS
        text = await asyncio.to_thread(decoding) if is_long else decoding()
        return json_response(DetokenizeResponse(prompt=text))

    async def healthz(self, _request: Request) -> Response:
        """200 while requests can be accepted; ``num_workers`` says whether they move at once."""
        gateway = self._gateway
        connected = gateway.bus.connected
        workers = gateway.fleet.live_workers()
        if gateway.draining:
            status = "draining"
        elif not connected:
            status = "bus_unavailable"
        else:
            status = "ok" if workers else "waiting_for_workers"
        health = {
            "status": status,
            "bus_connected": connected,
            "num_workers": len(workers),
            "models": sorted({worker.model for worker in workers}),
            "gateway_id": gateway.gateway_id,
            "open_streams": gateway.streams.num_served,
        }
        return json_response(health, 503 if gateway.draining or not connected else 200)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._gateway.metrics.render(), media_type=_PROMETHEUS)
