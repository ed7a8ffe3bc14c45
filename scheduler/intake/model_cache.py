"""The models that jobs are prepared with, loaded when the first job asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from millrace.registry.pricing import UNPRICED, PriceBook
from millrace.registry.tokenizers.prompt_pool import PromptPool, num_characters
from millrace.schemas.jobs import Job


class Preparer(Protocol):
    """What the scheduler needs of ``registry.served.ServedModel``."""

    @property
    def prices(self) -> PriceBook: ...

    def prepare(self, job: Job, seed_source: random.Random) -> Job: ...


class ModelCache:
    """Loads each model once. ``load`` may block: it runs in a thread. Owns the threads that read
    long prompts; ``close`` ends them."""

    def __init__(self, load: Callable[[str], Preparer]) -> None:
        self._load = load
        self._prompts = PromptPool()
        self._models: dict[str, asyncio.Task[Preparer]] = {}

    async def prepare(self, job: Job) -> Job:
        """The job with token ids, max_tokens and seed. Raises MillraceError for a bad one.

        A seed is drawn from the request id, so that every scheduler draws the same: a job that is
        delivered again starts again from the same seed.
        """
        model = await self._get(job.model)
        seed_source = random.Random(job.request_id)
        prepare = partial(model.prepare, job, seed_source)
        return await self._prompts.run(job.tenant, num_characters(job), prepare)

    def prices(self, model: str) -> PriceBook:
        """A model's prices; none if it is not loaded."""
        loading = self._models.get(model)
        if loading is None or not loading.done() or loading.cancelled() or loading.exception():
            return UNPRICED
        return loading.result().prices

    def close(self) -> None:
        self._prompts.close()

    async def warm(self, model: str) -> None:
        """Load a model before the first job asks for it."""
        await self._get(model)

    async def _get(self, model: str) -> Preparer:
        loading = self._models.get(model)
        if loading is None:
            loading = asyncio.create_task(
                asyncio.to_thread(self._load, model), name=f"load {model}"
            )
            self._models[model] = loading
        try:
            return await asyncio.shield(loading)
        except Exception:
            # The next job tries again: the hub may be back, the files may be there.
            if self._models.get(model) is loading:
                del self._models[model]
            raise
