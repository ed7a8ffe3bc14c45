"""Engine intake: requests go in at once, or one at a time after an engine crashed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from millrace.engine.types import EngineRequest
from millrace.schemas.control import Warm
from millrace.schemas.engines import PROMISES
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Job
from millrace.schemas.prefix import salt_of
from millrace.schemas.sampling import SamplingParams
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.generations.generation import Generation


def cache_salt_of(job: Job, prefix_scope: str) -> str:
    """Return the salt that separates a job's prefixes from other jobs', for the worker's
    ``prefix_scope``.
    """
    tenant = job.tenant if prefix_scope == "tenant" else ""
    return salt_of(tenant, job.cache_salt, job.adapter_version)


def warming_request(engine_id: str, warm: Warm, cache_salt: str) -> EngineRequest:
    """Return an engine request that only pulls the KV blocks of a job's tokens so far."""
    return EngineRequest(
        request_id=engine_id,
        prompt_token_ids=(*(warm.job.prompt_token_ids or ()), *warm.token_ids),
        sampling=SamplingParams(max_tokens=1, seed=0),
        cache_salt=cache_salt,
        kv_source=warm.kv_source,
        warms=True,
    )


def engine_request(
    generation: Generation, eos_token_ids: Sequence[int], cache_salt: str
) -> EngineRequest:
    """Return the request for the rest of a generation, after its tokens so far."""
    job = generation.job
    sampling, token_ids = SamplingParams.of(job.sampling), tuple(generation.output.token_ids)
    if generation.known_outcome is not None:
        # Scoring a prompt produces one token after it, which is dropped.
        token_ids = ()
        sampling = SamplingParams(
            max_tokens=1, seed=sampling.seed, prompt_logprobs=sampling.prompt_logprobs
        )
    return EngineRequest(
        request_id=generation.engine_id,
        prompt_token_ids=generation.prompt_token_ids,
        sampling=sampling,
        eos_token_ids=tuple(eos_token_ids),
        output_token_ids=token_ids,
        priority=generation.priority,
        cache_salt=cache_salt,
        pooling=job.pooling,
        watched=job.sampling.may_end_in_text,
        adapter=generation.adapter,
        # A prediction that is still text was not tokenized by a gateway or scheduler.
        prediction_token_ids=() if isinstance(job.prediction, str) else job.prediction,
        kv_source=generation.kv_source,
        tenant=job.tenant,
    )


logger = logging.getLogger(__name__)


class EngineKilledError(MillraceError, code="engine_killed"):
    """Request during which the engine died twice, the second time while it ran alone."""

    def __init__(self) -> None:
        super().__init__(
            "The engine's process ended twice while it computed the next token of this request, "
            "so the request is not retried. Other requests continue. Change the request before you "
            "send it again, and tell the operator: the worker's log has the details."
        )


class EngineIntake:
    """Path of all requests into the engine.

    Normally a request goes in at once. After a crash, any request that the engine had may have
    killed it. So the next engine gets these suspects one at a time, each until it has produced a
    token; among equal priorities the small ones go first. New requests wait behind them. If the
    engine crashes again, the request that it ran alone is the poison pill. So a poison pill ends
    after its second crash, and the other requests of its batch continue.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._engine = context.engine
        self._eos_token_ids = context.model.eos_token_ids
        self._prefix_scope = context.config.prefix_scope
        self._promises = PROMISES[context.config.engine.kind]
        self._has_engine = True
        self._tested: Generation | None = None
        self._suspects: dict[Generation, None] = {}
        self._newcomers: dict[Generation, None] = {}

    def add(self, generation: Generation) -> None:
        """Run a request that no engine has run yet."""
        if self._has_engine and self._tested is None:
            self._admit(generation)
        else:
            self._newcomers[generation] = None

    def note_token(self, generation: Generation) -> None:
        """Clear a request of suspicion: the engine has produced a token for it."""
        if generation is self._tested:
            self._try_next()

    def remove(self, generation: Generation) -> None:
        """Forget a request that is over."""
        self._newcomers.pop(generation, None)
        self._suspects.pop(generation, None)
        if generation is self._tested:
            self._try_next()

    def engine_lost(self, running: Iterable[Generation]) -> Generation | None:
        """Record that the engine died with the requests ``running``. Return the poison pill, if it
        is known.

        The caller must end the poison pill. The other requests continue in the next engine.
        """
        self._has_engine = False
        blamed, self._tested = self._tested, None
        had = [g for g in running if g is not blamed and g not in self._newcomers]
        for generation in had:
            if generation.trace is not None:
                generation.trace.add_event("engine lost")
        had.sort(key=lambda g: (-g.priority, g.num_tokens))
        self._suspects = dict.fromkeys(had)
        return blamed

    def engine_replaced(self) -> None:
        """Resume: there is an engine again."""
        self._has_engine = True
        self._try_next()

    def _try_next(self) -> None:
        last, self._tested = self._tested, None
        if not self._has_engine:
            return
        if self._suspects:
            self._tested = next(iter(self._suspects))
            del self._suspects[self._tested]
            self._admit(self._tested)
            return
        if last is not None:
            logger.info("all requests continue in the new engine")
        newcomers, self._newcomers = self._newcomers, {}
        for generation in newcomers:
            self._admit(generation)

    def _admit(self, generation: Generation) -> None:
        is_sampled = SamplingParams.of(generation.job.sampling).temperature > 0
        is_continued = bool(generation.output.token_ids)
        if is_continued and is_sampled and not self._promises.continues_sampling:
            generation.accounting.resampled = True
        salt = cache_salt_of(generation.job, self._prefix_scope)
        self._engine.add(engine_request(generation, self._eos_token_ids, salt))
