"""Models that requests may name, with their tokenizers, loaded on first use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self, cast

import msgspec

from millrace.bus.fleet.adapters import AdapterDirectory
from millrace.bus.fleet.directories import Directories
from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.registry.checkpoints.adapters.outline import AdapterOutline
from millrace.registry.checkpoints.classifier import ClassifierHead
from millrace.registry.pricing import PriceBook
from millrace.registry.rollouts import versions
from millrace.registry.rollouts.versions import Versions, split
from millrace.registry.routing.router import Route, Router
from millrace.registry.served import EmbeddingSettings
from millrace.registry.tokenizers.token_bytes import TokenBytes
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.context_length import PromptParts
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ModelNotFoundError, ParameterError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.models.adapters import Adapter
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.models.rollouts import Rollout
from millrace.schemas.pooling import ModelTask
from millrace.schemas.sampling import SamplingDefaults
from millrace.schemas.tools import ToolDefinition, ToolFormat


class TokenizerLike(Protocol):
    """Subset of ``registry.tokenizers.tokenizer.Tokenizer`` that the gateway uses."""

    @property
    def table(self) -> TokenBytes: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = ...,
    ) -> list[int]: ...

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def spelling(self, token_id: int) -> str: ...


class ServedModelLike(Protocol):
    """Subset of ``registry.served.ServedModel`` that the gateway uses."""

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def context_window_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Return the tokens that end a generation unless it ignores them."""

    @property
    def tool_format(self) -> ToolFormat | None: ...

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Return the format of the model's thoughts; None if it has none."""

    @property
    def engine_kind(self) -> EngineKind: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Return the defaults of sampling parameters that a request leaves out."""

    @property
    def prices(self) -> PriceBook: ...

    @property
    def task(self) -> ModelTask:
        """Return the task of the model."""

    @property
    def classifier(self) -> ClassifierHead | None:
        """Return the labels of a classifier or reranker; None for other models."""

    def adapter_outline(self, folder: Path) -> AdapterOutline:
        """Return the adapter in ``folder``, which fits the model. Raises AdapterError."""

    @property
    def embedding_size(self) -> int: ...

    @property
    def embedding_defaults(self) -> EmbeddingSettings: ...

    def with_chat_template(self, source: str) -> Self:
        """Return the same model with the template of a request. Raises
        ParameterError("chat_template").
        """

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """Return the job with token ids, max_tokens and seed. Raises MillraceError for invalid
        input.
        """

    def prompt_parts(self, job: Job, num_prompt_tokens: int | None) -> PromptParts | None:
        """Return the length of each part of the prompt of ``num_prompt_tokens``; None for a prompt
        not made of messages.
        """


class _ProxiedModel:
    """Model under another name. All else is delegated to the model."""

    def __init__(self, model: ServedModelLike) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _AdaptedModel(_ProxiedModel):
    """Model with an adapter: its jobs name the adapter. All else is delegated to the model."""

    def __init__(self, model: ServedModelLike, adapter: Adapter) -> None:
        super().__init__(model)
        self._adapter = adapter

    @cached_property
    def prices(self) -> PriceBook:
        """Return the adapter's price book, or the model's if it has none."""
        prices = self._adapter.prices
        return self._model.prices if prices is None else msgspec.convert(prices, PriceBook)

    def with_chat_template(self, source: str) -> ServedModelLike:
        """Return the same model with the template of a request."""
        return _adapted(self._model.with_chat_template(source), self._adapter)

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """Return the job, ready for a worker. Raises as the model does."""
        adapter = self._adapter
        own = msgspec.structs.replace(
            job, model=adapter.model, adapter=adapter.name, adapter_version=adapter.version
        )
        return self._model.prepare(own, seed_source)


def _adapted(model: ServedModelLike, adapter: Adapter) -> ServedModelLike:
    """Return ``model`` with one of its adapters."""
    return cast("ServedModelLike", _AdaptedModel(model, adapter))


class _VersionedModel(_ProxiedModel):
    """Model at one version: its jobs name the version. All else is delegated to the model."""

    def __init__(self, model: ServedModelLike, version: str) -> None:
        super().__init__(model)
        self._version = version

    def with_chat_template(self, source: str) -> ServedModelLike:
        """Return the same model with the template of a request."""
        return _of_version(self._model.with_chat_template(source), self._version)

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """Return the job, ready for a worker of the version. Raises as the model does."""
        own = msgspec.structs.replace(
            job,
            model=self._version,
            model_requested=job.model_requested or job.model,
            route_reason=job.route_reason or versions.REASON,
        )
        return self._model.prepare(own, seed_source)


def _of_version(model: ServedModelLike, version: str) -> ServedModelLike:
    """Return ``model`` as requested by a name that stands for several versions."""
    return cast("ServedModelLike", _VersionedModel(model, version))


class LoadedModels:
    """Models, each loaded once, in a thread; the next caller retries a failed load.

    Requests may also name routes of ``router``, adapters of ``adapters`` by their tenants, and
    names that stand for several versions, of which rollouts choose one.
    """

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        load: Callable[[str], ServedModelLike],
        router: Router | None = None,
        adapters: AdapterDirectory | None = None,
    ) -> None:
        self.router = router or Router()
        self._adapters = adapters
        self._rollouts: RolloutDirectory | None = None
        self._cards = dict(cards)
        self._versions = Versions(cards)
        self._load = load
        self._loaded: dict[str, ServedModelLike] = {}
        self._locks = {name: asyncio.Lock() for name in cards}

    def names(self) -> Sequence[str]:
        """Return the names of the models, without routes, adapters and version aliases."""
        return list(self._cards)

    def change(
        self,
        cards: Mapping[str, ModelCard],
        load: Callable[[str], ServedModelLike],
        router: Router,
        changed: Collection[str],
    ) -> None:
        """Replace the catalogue; ``changed`` has the names that are new, removed or different.
        Callers that hold a model keep it.
        """
        self.router = router
        self._cards = dict(cards)
        self._versions = Versions(cards)
        self._load = load
        for name in changed:
            self._loaded.pop(name, None)
            self._locks[name] = asyncio.Lock()

    def follow(self, directories: Directories) -> None:
        """Use these adapters from now on, and choose versions by these rollouts."""
        self._adapters = directories.adapters
        self._rollouts = directories.rollouts

    def version(self, name: str, key: str) -> str | None:
        """Return the version that answers a request for a name that stands for several, as
        ``Versions`` chooses it; None for a name that stands for itself only. Raises
        ModelNotFoundError for a name without a version, such as the canary's between rollouts.
        """
        if not self._versions.stands_for_several(name):
            return None
        version = self._versions.resolve(name, key, self._open_rollouts())
        if version is None:
            raise ModelNotFoundError(f"There is no model {name!r} just now.")
        return version

    def stable_version(self, name: str) -> str | None:
        """Return the stable version, as ``version`` does without the share of a rollout's
        candidate.
        """
        if not self._versions.stands_for_several(name):
            return None
        if name in self._versions.models():
            return self._versions.stable(name, self._open_rollouts())
        return self.version(name, "")

    def family(self, name: str) -> tuple[str, ...]:
        """Return all versions of the model that a name belongs to, or stands for; otherwise the
        name alone.
        """
        return self._versions.family(name)

    def _open_rollouts(self) -> Mapping[str, Rollout]:
        return {} if self._rollouts is None else self._rollouts.rollouts

    def cards(self, tenant: str = "") -> list[ModelCard]:
        """Return the cards of all models as a tenant sees them, then of routes, then of
        adapters.
        """
        several = [name for name in self._versions.models() if name not in self._cards]
        names = (*self._cards, *several, *self.router.routes)
        cards = [self.card(name, tenant) for name in names]
        return cards + [self._card_of_adapter(one) for one in self._adapters_for(tenant)]

    def card(self, name: str, tenant: str = "") -> ModelCard:
        """Return the card of a name. Raises ModelNotFoundError."""
        route = self.router.routes.get(name)
        if route is not None:
            return self._card_of(name, route)
        version = self.stable_version(name)
        if version is not None:
            return self._card_of_versions(name, self._own_card(version, tenant))
        if name in self._cards:
            return self._own_card(name, tenant)
        adapter = None if self._adapters is None else self._adapters.known(name, tenant)
        if adapter is not None and adapter.model in self._cards:
            return self._card_of_adapter(adapter)
        raise ModelNotFoundError(
            f"There is no model {name!r} here. The models are: {', '.join(self._cards)}."
        )

    def _own_card(self, name: str, tenant: str) -> ModelCard:
        """Return the card of a model in the catalogue."""
        known = self._cards[name]
        own = tuple(one.name for one in self._adapters_for(tenant) if one.model == name)
        model = split(name)[0]
        known = msgspec.structs.replace(
            known, adapters=own, parent=model if model in self._versions.models() else None
        )
        loaded = self._loaded.get(name)
        if loaded is None:
            return known
        return msgspec.structs.replace(
            known,
            max_model_len=loaded.context_window_tokens,
            sampling_defaults=loaded.sampling_defaults,
            task=loaded.task,
        )

    async def adapter(self, name: str, tenant: str) -> Adapter | None:
        """Return the adapter that a tenant calls so, if no model has that name."""
        if self._adapters is None or name in self._cards or name in self.router.routes:
            return None
        adapter = await self._adapters.find(name, tenant)
        return adapter if adapter is not None and adapter.model in self._cards else None

    async def get(
        self, name: str, tenant: str = "", adapter: Adapter | None = None
    ) -> ServedModelLike:
        """Return the model of that name; with ``adapter``, or with the tenant's adapter of that
        name.

        Raises ModelNotFoundError, ParameterError for a name that stands for several models, or
        CheckpointError for unusable files.
        """
        model = self._loaded.get(name)
        if model is not None and adapter is None:
            return model
        if adapter is None:
            adapter = await self.adapter(name, tenant)
        if adapter is not None:
            return _adapted(await self.get(adapter.model), adapter)
        if name not in self._cards and (version := self.stable_version(name)) is not None:
            return _of_version(await self.get(version), version)
        route = self.router.routes.get(name)
        if route is not None:
            raise ParameterError(
                "model",
                f"{name} chooses a model for each completion; name one here: "
                f"{route.small} or {route.large}.",
            )
        self.card(name)
        async with self._locks[name]:
            model = self._loaded.get(name)
            if model is None:
                load = self._load
                model = await asyncio.to_thread(load, name)
                if load is self._load:  # otherwise the catalogue changed meanwhile
                    self._loaded[name] = model
            return model

    async def get_named(self, name: str, tenant: str = "") -> ServedModelLike:
        """Return the model of a name without rollouts' candidates: of several versions the stable
        one. Raises as ``get`` does.
        """
        version = self.stable_version(name)
        if version is None:
            return await self.get(name, tenant)
        return _of_version(await self.get(version, tenant), version)

    def _adapters_for(self, tenant: str) -> list[Adapter]:
        if self._adapters is None:
            return []
        every = self._adapters.adapters.values()
        return [one for one in every if one.is_for(tenant) and one.model in self._cards]

    def _card_of_adapter(self, adapter: Adapter) -> ModelCard:
        """Return the card of an adapter: its model's card with the adapter's own fields."""
        card = self._own_card(adapter.model, "")
        return msgspec.structs.replace(
            card,
            id=adapter.name,
            parent=adapter.model,
            created=adapter.created_ns // 1_000_000_000,
            description=adapter.description or f"{adapter.name}, fine-tuned from {adapter.model}",
            adapters=(),
        )

    def _card_of_versions(self, name: str, card: ModelCard) -> ModelCard:
        """Return the card of an alias of versions: the answering version's card, with the share of
        requests of each version.
        """
        if name not in self._versions.models():
            return msgspec.structs.replace(card, id=name, parent=self._versions.model_of(name))
        shares = self._versions.shares(name, self._open_rollouts())
        return msgspec.structs.replace(card, id=name, parent=None, versions=shares)

    def _card_of(self, name: str, route: Route) -> ModelCard:
        """Return the card of a route, with the longer window of its two models and the creation
        time of the newer one.
        """
        cards = [self.card(model) for model in route.models]
        windows = [card.max_model_len for card in cards if card.max_model_len is not None]
        return ModelCard(
            id=name,
            created=max(card.created for card in cards),
            max_model_len=max(windows) if len(windows) == len(cards) else None,
            description=route.description
            or f"{route.small} or {route.large}, chosen for each request",
        )
