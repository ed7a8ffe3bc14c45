"""The models that may be asked for, with their tokenizers, loaded when they are first needed."""

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
    """What the gateway uses of ``registry.tokenizers.tokenizer.Tokenizer``."""

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
    """What the gateway uses of ``registry.served.ServedModel``."""

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def context_window_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The tokens that end a generation unless it ignores them."""

    @property
    def tool_format(self) -> ToolFormat | None: ...

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model marks its thoughts; None: it has none."""

    @property
    def engine_kind(self) -> EngineKind: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What requests are sampled with that do not say."""

    @property
    def prices(self) -> PriceBook: ...

    @property
    def task(self) -> ModelTask:
        """What it is for."""

    @property
    def classifier(self) -> ClassifierHead | None:
        """Its labels, if it makes numbers for these and nothing else."""

    def adapter_outline(self, folder: Path) -> AdapterOutline:
        """The adapter in ``folder``, which fits the model. Raises AdapterError."""

    @property
    def embedding_size(self) -> int: ...

    @property
    def embedding_defaults(self) -> EmbeddingSettings: ...

    def with_chat_template(self, source: str) -> Self:
        """The same with the template of a request. Raises ParameterError("chat_template")."""

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """The job with token ids, max_tokens and seed. Raises MillraceError for bad input."""

    def prompt_parts(self, job: Job, num_prompt_tokens: int | None) -> PromptParts | None:
        """Which part of the prompt of ``num_prompt_tokens`` is how long; None: it is not made of
        messages."""


class _ProxiedModel:
    """A model that is asked for by another name than its own. All else is the model's."""

    def __init__(self, model: ServedModelLike) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _AdaptedModel(_ProxiedModel):
    """Its jobs are the model's, and name the adapter. All else is the model's."""

    def __init__(self, model: ServedModelLike, adapter: Adapter) -> None:
        super().__init__(model)
        self._adapter = adapter

    @cached_property
    def prices(self) -> PriceBook:
        """Its own, if it has a price book."""
        prices = self._adapter.prices
        return self._model.prices if prices is None else msgspec.convert(prices, PriceBook)

    def with_chat_template(self, source: str) -> ServedModelLike:
        """The same with the template of a request."""
        return _adapted(self._model.with_chat_template(source), self._adapter)

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """The job, ready for a worker. Raises what the model raises."""
        adapter = self._adapter
        own = msgspec.structs.replace(
            job, model=adapter.model, adapter=adapter.name, adapter_version=adapter.version
        )
        return self._model.prepare(own, seed_source)


def _adapted(model: ServedModelLike, adapter: Adapter) -> ServedModelLike:
    """``model`` with an adapter of it."""
    return cast("ServedModelLike", _AdaptedModel(model, adapter))


class _VersionedModel(_ProxiedModel):
    """Its jobs are one version's. All else is that version's."""

    def __init__(self, model: ServedModelLike, version: str) -> None:
        super().__init__(model)
        self._version = version

    def with_chat_template(self, source: str) -> ServedModelLike:
        """The same with the template of a request."""
        return _of_version(self._model.with_chat_template(source), self._version)

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """The job, ready for a worker of the version. Raises what the model raises."""
        own = msgspec.structs.replace(
            job,
            model=self._version,
            model_requested=job.model_requested or job.model,
            route_reason=job.route_reason or versions.REASON,
        )
        return self._model.prepare(own, seed_source)


def _of_version(model: ServedModelLike, version: str) -> ServedModelLike:
    """``model`` as it is asked for by a name that stands for several versions."""
    return cast("ServedModelLike", _VersionedModel(model, version))


class LoadedModels:
    """Loads each model once, in a thread; a load that failed is tried again by the next caller.
    The names of ``router`` can be asked for as well, by those who leave the choice, those of
    ``adapters``, by the tenants that they are for, and those that stand for several versions, of
    which rollouts choose."""

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
        """Those of the models, without the names that choose one."""
        return list(self._cards)

    def change(
        self,
        cards: Mapping[str, ModelCard],
        load: Callable[[str], ServedModelLike],
        router: Router,
        changed: Collection[str],
    ) -> None:
        """These from now on; ``changed`` are the names that are new, gone, or not as they were.
        Whoever has a model in hand goes on with it."""
        self.router = router
        self._cards = dict(cards)
        self._versions = Versions(cards)
        self._load = load
        for name in changed:
            self._loaded.pop(name, None)
            self._locks[name] = asyncio.Lock()

    def follow(self, directories: Directories) -> None:
        """Offer these adapters from now on, and choose versions by these rollouts."""
        self._adapters = directories.adapters
        self._rollouts = directories.rollouts

    def version(self, name: str, key: str) -> str | None:
        """The version that answers a request for a name that stands for several, as ``Versions``
        has it; None: the name stands for none but itself. Raises ModelNotFoundError for a name
        whose version is not there, such as the canary's between rollouts."""
        if not self._versions.stands_for_several(name):
            return None
        version = self._versions.resolve(name, key, self._open_rollouts())
        if version is None:
            raise ModelNotFoundError(f"There is no model {name!r} just now.")
        return version

    def stable_version(self, name: str) -> str | None:
        """As ``version``, whatever share of requests a rollout gives to another."""
        if not self._versions.stands_for_several(name):
            return None
        if name in self._versions.models():
            return self._versions.stable(name, self._open_rollouts())
        return self.version(name, "")

    def family(self, name: str) -> tuple[str, ...]:
        """All versions of the model that a name is one of, or stands for; else the name alone."""
        return self._versions.family(name)

    def _open_rollouts(self) -> Mapping[str, Rollout]:
        return {} if self._rollouts is None else self._rollouts.rollouts

    def cards(self, tenant: str = "") -> list[ModelCard]:
        """All models, as a tenant's clients see them, then the names that choose one, then
        adapters."""
        several = [name for name in self._versions.models() if name not in self._cards]
        names = (*self._cards, *several, *self.router.routes)
        cards = [self.card(name, tenant) for name in names]
        return cards + [self._card_of_adapter(one) for one in self._adapters_for(tenant)]

    def card(self, name: str, tenant: str = "") -> ModelCard:
        """Raises ModelNotFoundError."""
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
        """Of one of the catalogue."""
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
        """The adapter that a tenant calls so, if it is none of a model's names."""
        if self._adapters is None or name in self._cards or name in self.router.routes:
            return None
        adapter = await self._adapters.find(name, tenant)
        return adapter if adapter is not None and adapter.model in self._cards else None

    async def get(
        self, name: str, tenant: str = "", adapter: Adapter | None = None
    ) -> ServedModelLike:
        """The model of that name in the catalogue; with the ``adapter`` that the name is known to
        stand for, or that it stands for among those of the ``tenant``.

        Raises ModelNotFoundError, ParameterError for a name that stands for several models, or
        CheckpointError if its files cannot be used.
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
                if load is self._load:  # else it may be another one meanwhile
                    self._loaded[name] = model
            return model

    async def get_named(self, name: str, tenant: str = "") -> ServedModelLike:
        """What a client calls so where no share of its requests goes to a rollout's candidate: of
        several versions the stable one. Raises what ``get`` raises."""
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
        """As that of its model, but for what is its own."""
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
        """As that of the version that answers, and which share of requests each of them gets."""
        if name not in self._versions.models():
            return msgspec.structs.replace(card, id=name, parent=self._versions.model_of(name))
        shares = self._versions.shares(name, self._open_rollouts())
        return msgspec.structs.replace(card, id=name, parent=None, versions=shares)

    def _card_of(self, name: str, route: Route) -> ModelCard:
        """A route has the longer window of its two models, and is as old as the newer one."""
        cards = [self.card(model) for model in route.models]
        windows = [card.max_model_len for card in cards if card.max_model_len is not None]
        return ModelCard(
            id=name,
            created=max(card.created for card in cards),
            max_model_len=max(windows) if len(windows) == len(cards) else None,
            description=route.description
            or f"{route.small} or {route.large}, by what is asked of it",
        )
