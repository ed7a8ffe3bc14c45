"""The models that jobs are prepared with, loaded when the first job asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from registry.pricing import UNPRICED, PriceBook
from registry.served import MAX_INLINE_CHARACTERS
from schemas.jobs import Job

# Beyond this many token ids, checking them leaves the event loop.
_MAX_INLINE_TOKENS = 4_096


class Preparer(Protocol):
    """What the scheduler needs of ``registry.served.ServedModel``."""

    @property
    def prices(self) -> PriceBook: ...

    def prepare(self, job: Job, seed_source: random.Random) -> Job: ...


class Shelf:
    """Loads each model once. ``load`` may block: it runs in a thread."""

    def __init__(self, load: Callable[[str], Preparer]) -> None:
        self._load = load
        self._models: dict[str, asyncio.Task[Preparer]] = {}

    async def prepare(self, job: Job) -> Job:
        """The job with token ids, max_tokens and seed. Raises MillraceError for a bad one.

        A seed is drawn from the request id, so that every scheduler draws the same: a job that is
        delivered again starts again from the same seed.
        """
        model = await self._get(job.model)
        seed_source = random.Random(job.request_id)
        if _is_short(job):
            return model.prepare(job, seed_source)
        return await asyncio.to_thread(model.prepare, job, seed_source)

    def prices(self, model: str) -> PriceBook:
        """A model's prices; none if it is not loaded."""
        loading = self._models.get(model)
        if loading is None or not loading.done() or loading.cancelled() or loading.exception():
            return UNPRICED
        return loading.result().prices

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


def _is_short(job: Job) -> bool:
    if job.tools:
        return False  # Schemas may be long, and are rendered each.
    if job.prompt_token_ids is not None:
        return len(job.prompt_token_ids) <= _MAX_INLINE_TOKENS
    if job.prompt is not None:
        return len(job.prompt) <= MAX_INLINE_CHARACTERS
    return sum(len(message.content) for message in job.messages or ()) <= MAX_INLINE_CHARACTERS
