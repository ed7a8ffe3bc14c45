"""Cache of the models that prepare jobs, each loaded when a job first needs it."""

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
    """Prepared model as the scheduler uses it. See ``registry.served.ServedModel``."""

    @property
    def prices(self) -> PriceBook: ...


class ModelCache:
    """Model cache that loads each model once.

    ``load`` may block: it runs in a thread. Jobs may bring chat templates if ``trusts_templates``.
    Owns the threads that tokenize long prompts. ``close`` ends them.
    """

    def __init__(self, load: Callable[[str], Preparer], *, trusts_templates: bool = False) -> None:
        self._load = load
        self._trusts_templates = trusts_templates
        self._prompts = PromptPool()
        self._models: dict[str, asyncio.Task[Preparer]] = {}

    async def prepare(self, job: Job) -> Job:
        """Return the job with token ids, max_tokens and seed.

        Raises MillraceError for an invalid job.

        The seed derives from the request id, so a redelivered job starts from the same seed in
        every scheduler.
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
        """Parse the body of a job. Raises MillraceError for an invalid one."""
        return await self._prompts.run(job.tenant, len(job.body), partial(read_body, job))

    def change(self, load: Callable[[str], Preparer], names: Iterable[str]) -> None:
        """Drop these models, and load models by ``load`` from now on.

        Jobs in preparation go on with the old model.
        """
        self._load = load
        for name in names:
            self._models.pop(name, None)

    def prices(self, model: str) -> PriceBook:
        """Return a model's prices; no prices if it is not loaded."""
        loading = self._models.get(model)
        if loading is None or not loading.done() or loading.cancelled() or loading.exception():
            return UNPRICED
        return loading.result().prices

    def close(self) -> None:
        self._prompts.close()

    async def get(self, model: str) -> Preparer:
        """Return a model, loaded once. Raises the loader's error."""
        loading = self._models.get(model)
        if loading is None:
            loading = asyncio.create_task(
                asyncio.to_thread(self._load, model), name=f"load {model}"
            )
            self._models[model] = loading
        try:
            return await asyncio.shield(loading)
        except Exception:
            # Retry with the next job: the hub or the files may be back.
            if self._models.get(model) is loading:
                del self._models[model]
            raise
