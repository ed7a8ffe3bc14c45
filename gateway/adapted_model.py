"""A model with a LoRA adapter, as the gateway makes jobs for it."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millrace.registry.pricing import PriceBook
from millrace.schemas.jobs import Job
from millrace.schemas.models.adapters import Adapter

if TYPE_CHECKING:
    from millrace.gateway.models import ServedModelLike


class _AdaptedModel:
    """Its jobs are the model's, and name the adapter. All else is the model's."""

    def __init__(self, model: ServedModelLike, adapter: Adapter) -> None:
        self._model = model
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @cached_property
    def prices(self) -> PriceBook:
        """Its own, if it has a price book."""
        prices = self._adapter.prices
        return self._model.prices if prices is None else msgspec.convert(prices, PriceBook)

    def with_chat_template(self, source: str) -> ServedModelLike:
        """The same with the template of a request."""
        return adapted(self._model.with_chat_template(source), self._adapter)

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """The job, ready for a worker. Raises what the model raises."""
        adapter = self._adapter
        own = msgspec.structs.replace(
            job, model=adapter.model, adapter=adapter.name, adapter_version=adapter.version
        )
        return self._model.prepare(own, seed_source)


def adapted(model: ServedModelLike, adapter: Adapter) -> ServedModelLike:
    """``model`` with an adapter of it."""
    return cast("ServedModelLike", _AdaptedModel(model, adapter))
