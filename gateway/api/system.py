"""Endpoints beside the token path: models, tokenize, health, metrics, tools, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.bus.storage import NATS
from millrace.bus.tenancy.accounts import Account, AccountUsage, remaining
from millrace.gateway.api.messages import VERSION_HEADER, model_info, model_page
from millrace.gateway.api.rest import RestApi, decode_as
from millrace.gateway.models import ServedModelLike
from millrace.gateway.tenancy.identity import AuthenticationError, Caller, require_admin
from millrace.gateway.transport.http import header_of, json_response
from millrace.gateway.transport.origins import is_forwarded
from millrace.registry.requests.message_fields import chat_messages, left_out_of
from millrace.registry.requests.offered.chat_tools import given_tools
from millrace.registry.requests.offered.offered_tools import AskedChoice, offered_tools
from millrace.registry.requests.ready_jobs import check_template
from millrace.registry.tokenizers.prompt_pool import num_characters_with
from millrace.runtime.addresses import is_loopback
from millrace.runtime.metrics_server import bears_token, build_version, exposition
from millrace.schemas.chat.completions import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.jobs import Tier
from millrace.schemas.models.cards import ModelCard, ModelList
from millrace.schemas.notices import Notices, bounded, field_of
from millrace.schemas.tenants import LimitSet, Remaining, check_tenant, from_nano, lower_limit

_AskedT = TypeVar("_AskedT", TokenizeRequest, DetokenizeRequest)

_Status = Literal[
    "ok", "waiting_for_workers", "degraded", "storage_full", "bus_unavailable", "draining"
]
_CANNOT_ACCEPT = {"draining", "bus_unavailable", "storage_full"}
# This endpoint's field name, then the names of other servers.
TOKENIZE_PATHS = ("/v1/tokenize", "/tokenize")
DETOKENIZE_PATHS = ("/v1/detokenize", "/detokenize")
HEALTH_PATHS = ("/healthz", "/health", "/ping")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``/healthz``. ``stores`` has the stores without room, and the reasons. Status
    ``degraded``: requests can do without that store for a while.
    """

    status: _Status
    bus_connected: bool
    num_workers: int
    models: tuple[str, ...]
    gateway_id: str
    open_streams: int
    stores: dict[str, str]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class ServerTool(msgspec.Struct, frozen=True, kw_only=True):
    """Tool that the gateway runs itself. ``parameters`` is the JSON Schema of its arguments."""

    name: str
    object: Literal["tool"]
    description: str
    parameters: dict[str, Any] | None


class ServerToolList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    data: tuple[ServerTool, ...]


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Tenant or key with its limits, the remaining amounts, and this month's spend by currency.
    ``held`` is the maximum cost of running requests, already subtracted from the remaining amounts.
    """

    kind: Literal["tenant", "key"]
    name: str
    limits: LimitSet
    remaining: Remaining
    spent: Mapping[str, Decimal]
    held: Mapping[str, Decimal]


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /v1/limits``. ``tier`` is null for a tenant other than the caller's."""

    tenant: str
    tier: Tier | None
    accounts: tuple[AccountLimits, ...]
    object: Literal["limits"] = "limits"


class GatewayApi(RestApi):
    """Starlette endpoints over one gateway."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            *(Route(path, self.tokenize, methods=["POST"]) for path in TOKENIZE_PATHS),
            *(Route(path, self.detokenize, methods=["POST"]) for path in DETOKENIZE_PATHS),
            *(Route(path, self.healthz, methods=["GET"]) for path in HEALTH_PATHS),
            Route("/ping", self.healthz, methods=["POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/tools", self.tools, methods=["GET"]),
            Route("/v1/limits", self.limits, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        """List all models, in Anthropic's shape for clients that send ``anthropic-version``."""
        caller = await self._caller(request)
        cards = self._gateway.models.cards(caller.tenant)
        if header_of(request.scope, VERSION_HEADER) is not None:
            return json_response(model_page(request, cards, caller))
        return json_response(ModelList(data=tuple(map(self._with_tiers, cards))))

    async def model(self, request: Request) -> Response:
        caller = await self._caller(request)
        card = self._gateway.models.card(request.path_params["name"], caller.tenant)
        if header_of(request.scope, VERSION_HEADER) is not None:
            return json_response(model_info(card, caller))
        return json_response(self._with_tiers(card))

    def _with_tiers(self, card: ModelCard) -> ModelCard:
        """Return the card with the share of the model's window that each tier may use."""
        tiers = self._gateway.config.tiers
        windows = {
            tier.value: lower_limit(card.max_model_len, tiers.of(tier).context_tokens)
            for tier in Tier
        }
        return msgspec.structs.replace(card, tier_context_tokens=windows)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, or of messages in the chat template."""
        return await self._read_by(request, TokenizeRequest, _tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids. Incomplete characters become U+FFFD."""
        return await self._read_by(request, DetokenizeRequest, _detokenized)

    async def _read_by(
        self,
        request: Request,
        kind: type[_AskedT],
        answer: Callable[[_AskedT, ServedModelLike], object],
    ) -> Response:
        """Return the JSON of ``answer`` for a body. The call counts as a request. A long body is
        read and answered off the event loop.
        """
        gateway = self._gateway
        async with self._counted_body(request) as (caller, body):
            read = partial(gateway.prompts.run, caller.tenant)
            asked = await read(len(body), lambda: decode_as(kind, body))
            template = asked.chat_template if isinstance(asked, TokenizeRequest) else None
            check_template(template, is_trusted=gateway.config.trust_request_chat_template)
            model = await gateway.models.get_named(asked.model, caller.tenant)
            length = num_characters_with(template, len(body))
            value, encoded = await read(length, lambda: _encoded(answer(asked, model)))
        return json_response(value, encoded=encoded)

    async def healthz(self, _request: Request) -> Response:
        """Return status 200 while requests can be accepted. ``num_workers`` tells whether a worker
        can run them now; ``stores`` has the stores without room, and the reasons.
        """
        gateway = self._gateway
        workers = gateway.fleet.live_workers()
        troubles = gateway.stores.troubles()
        status: _Status = "ok" if workers else "waiting_for_workers"
        if gateway.draining:
            status = "draining"
        elif not gateway.bus.connected:
            status = "bus_unavailable"
        elif NATS in troubles:
            status = "storage_full"
        elif troubles:
            status = "degraded"
        health = Health(
            status=status,
            bus_connected=gateway.bus.connected,
            num_workers=len(workers),
            models=tuple(sorted({worker.model for worker in workers})),
            gateway_id=gateway.gateway_id,
            open_streams=gateway.streams.num_served,
            stores=troubles,
        )
        return json_response(health, 503 if status in _CANNOT_ACCEPT else 200)

    async def version(self, _request: Request) -> Response:
        return json_response(Version(version=build_version()))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics. Callers on other machines need ``metrics.token`` or an
        administrator's key, unless ``metrics.public`` is set.
        """
        exposure, host = self._gateway.exposure, self._gateway.config.host
        is_near = is_loopback(host) and not is_forwarded(request.scope)
        is_open = exposure.public or is_near
        if exposure.token:
            is_open = bears_token(request.headers.get("authorization", ""), exposure.token)
        if not is_open:
            await self._require_administrators_key(request)
        body, headers = exposition(self._gateway.metrics.registry, request.headers.raw)
        return Response(body, headers=headers)

    async def tools(self, request: Request) -> Response:
        """List the tools that a request may name in ``server_tools``, without their addresses."""
        await self._caller(request)
        listed = tuple(
            ServerTool(
                name=tool.name,
                object="tool",
                description=tool.definition.description,
                parameters=tool.definition.parameters,
            )
            for tool in self._gateway.tools.catalogue
        )
        return json_response(ServerToolList(object="list", data=listed))

    async def limits(self, request: Request) -> Response:
        """Return the caller's limits; an administrator may query the limits of ``?tenant=``."""
        caller = await self._caller(request)
        asked = request.query_params.get("tenant")
        tier: Tier | None = caller.tier
        if asked is not None and asked != caller.tenant:
            require_admin(caller)
            try:
                check_tenant(asked)
            except ValueError as error:
                raise ParameterError("tenant", f"{error}.") from error
            caller, tier = Caller(tenant=asked), None
        accounts = await self._gateway.limiter.caller_usage(caller)
        answer = CallerLimits(
            tenant=caller.tenant,
            tier=tier,
            accounts=tuple(account_limits(account, usage) for account, usage in accounts),
        )
        return json_response(answer)

    async def _require_administrators_key(self, request: Request) -> None:
        try:
            caller = await self._caller(request)
        except AuthenticationError as error:
            raise MetricsClosedError from error
        if not (caller.key_id and caller.is_admin):
            raise MetricsClosedError


def _encoded(value: object) -> tuple[object, bytes]:
    return value, msgspec.json.encode(value)


def _tokenized(asked: TokenizeRequest, model: ServedModelLike) -> TokenizeAnswer:
    if (asked.prompt is None) == (asked.messages is None):
        raise ParameterError("prompt", "Give exactly one of prompt and messages.")
    notices: Notices = ()
    if asked.messages is not None:
        if asked.chat_template is not None:
            model = model.with_chat_template(asked.chat_template)
        offered = offered_tools(given_tools(asked.tools or ()), AskedChoice())
        notices = bounded((*offered.notices, *left_out_of(asked.messages)))
        tokens = model.tokenizer.encode_chat(
            chat_messages(asked.messages),
            offered.tools,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            arguments=asked.chat_template_kwargs or {},
        )
    else:
        for name in ("tools", "chat_template", "chat_template_kwargs"):
            if getattr(asked, name):
                raise ParameterError(name, f"{name} goes with messages, not with prompt.")
        tokens = model.tokenizer.encode(asked.prompt or "", asked.add_special_tokens)
    spellings = map(model.tokenizer.spelling, tokens)
    return TokenizeAnswer(
        tokens=tuple(tokens),
        count=len(tokens),
        max_model_len=model.context_window_tokens,
        token_strs=tuple(spellings) if asked.return_token_strs else msgspec.UNSET,
        notices=field_of(notices),
    )


def _detokenized(asked: DetokenizeRequest, model: ServedModelLike) -> DetokenizeAnswer:
    for token_id in asked.tokens:
        if not 0 <= token_id < model.vocab_size:
            raise ParameterError(
                "tokens",
                f"{token_id} is not a token id: this model's are 0 to {model.vocab_size - 1}.",
            )
    skips = asked.skip_special_tokens
    return DetokenizeAnswer(prompt=model.tokenizer.decode(asked.tokens, skip_special_tokens=skips))


class MetricsClosedError(MillraceError, code="metrics_closed", http_status=401):
    """Metrics request without the required token or administrator's key."""

    def __init__(self) -> None:
        super().__init__(
            "Send metrics.token or an administrator's API key as Authorization: Bearer. The "
            "operator of this gateway can set metrics.token, or metrics.public to true."
        )
        self.headers = [(b"www-authenticate", b'Bearer realm="millrace metrics"')]


def account_limits(account: Account, usage: AccountUsage) -> AccountLimits:
    """Return an account in the shape of the endpoint."""
    spent = {currency: from_nano(spend.spent_nano) for currency, spend in usage.money.items()}
    held = {currency: from_nano(spend.held_nano) for currency, spend in usage.money.items()}
    return AccountLimits(
        kind=account.kind,
        name=account.name,
        limits=account.limits,
        remaining=remaining(account, usage),
        spent=spent,
        held=held,
    )
