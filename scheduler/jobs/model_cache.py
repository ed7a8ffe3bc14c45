"""The models that jobs are prepared with, loaded when the first job asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from millrace.registry.pricing import UNPRICED, PriceBook
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.job_bodies import prepare_body, read_body
from millrace.registry.requests.ready_jobs import PreparingModel
from millrace.registry.tokenizers.prompt_pool import (
    PromptPool,
    num_characters,
    num_characters_with,
)
from millrace.schemas.jobs import Job


class Preparer(PreparingModel, Protocol):
    """What the scheduler needs of ``registry.served.ServedModel``."""

    @property
    def prices(self) -> PriceBook: ...


class ModelCache:
    """Loads each model once. ``load`` may block: it runs in a thread. Chat templates of jobs are
    taken if ``trusts_templates``. Owns the threads that read long prompts; ``close`` ends them."""

    def __init__(self, load: Callable[[str], Preparer], *, trusts_templates: bool = False) -> None:
        self._load = load
        self._trusts_templates = trusts_templates
        self._prompts = PromptPool()
        self._models: dict[str, asyncio.Task[Preparer]] = {}

    async def prepare(self, job: Job) -> Job:
        """The job with token ids, max_tokens and seed. Raises MillraceError for a bad one.

        A seed is drawn from the request id, so that every scheduler draws the same: a job that is
        delivered again starts again from the same seed.
        """
        model = await self.get(job.model)
        seed_source = random.Random(job.request_id)
        if not job.body:
            prepare = partial(model.prepare, job, seed_source)
            return await self._prompts.run(job.tenant, num_characters(job), prepare)
        trusts = self._trusts_templates
        template = "" if trusts and b"chat_template" in job.body else None
        length = num_characters_with(template, len(job.body))
        prepare = partial(prepare_body, job, model, seed_source, trusts_templates=trusts)
        return await self._prompts.run(job.tenant, length, prepare)

    async def read(self, job: Job) -> GenerationRequest:
        """What the body of a job asks for. Raises MillraceError for a bad one."""
        return await self._prompts.run(job.tenant, len(job.body), partial(read_body, job))

    def change(self, load: Callable[[str], Preparer], names: Iterable[str]) -> None:
        """Load those anew, and all others from now on, by ``load``; whoever has a job in hand goes
        on with the former."""
        self._load = load
        for name in names:
            self._models.pop(name, None)

    def prices(self, model: str) -> PriceBook:
        """A model's prices; none if it is not loaded."""
        loading = self._models.get(model)
        if loading is None or not loading.done() or loading.cancelled() or loading.exception():
            return UNPRICED
        return loading.result().prices

    def close(self) -> None:
        self._prompts.close()

    async def get(self, model: str) -> Preparer:
        """Return a model, loaded once. Raises what loading raises."""
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
