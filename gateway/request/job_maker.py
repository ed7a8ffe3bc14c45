"""Conversion of requests to jobs, ready for a worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from millrace.bus.tenancy.errors import TierContextError
from millrace.gateway.models import ServedModelLike
from millrace.gateway.request.index import PromptTokenIds, RequestState
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tools.catalogue import ToolCatalogue
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import in_words, respelled
from millrace.registry.requests.ready_jobs import (
    PROMPT,
    check_template,
    of_one_job,
    prepared,
    with_prompt,
    with_tools,
)
from millrace.registry.tokenizers.prompt_pool import PromptPool, num_characters, num_characters_with
from millrace.schemas.chat.asked import Api, Asked
from millrace.schemas.errors import ContextLengthError, ParameterError
from millrace.schemas.jobs import Job, RequestPart, Source, Tier
from millrace.schemas.sampling import MAX_SEED
from millrace.schemas.tools import ToolDefinition, ToolMode


def job_id(request_id: str, choice: int, round_: int) -> str:
    """Return the id of the job of one round of one choice. The first round of the first choice has
    the request's own id.
    """
    return request_id + (f".{choice}" if choice else "") + (f"-r{round_}" if round_ else "")


def part_of(request: GenerationRequest, request_id: str, number: int) -> RequestPart | None:
    """Return which generation of the request the first round of its job of this number is; None for
    a request with a single generation. The choices of one prompt share the prompt.
    """
    num_choices = request.jobs_per_prompt
    if num_choices == 1 and not request.other_prompts and not request.server_tools:
        return None
    return RequestPart(request_id=request_id, choice=number, shares_prompt=number % num_choices > 0)


def next_round(job: Job, number: int) -> Job:
    """Return the job of a later round of the same choice, which pays for its own prompt."""
    part = job.part
    assert part is not None, "a request with tools of the gateway's may have several rounds"
    part = replace(part, round=number, shares_prompt=False)
    return replace(job, request_id=job_id(part.request_id, part.choice, number), part=part)


def job_of(state: RequestState, number: int, *, keep_transcript: bool) -> Job:
    """Return the job of this number, in its first round, of an accepted request. It has no prompt,
    and its frames go to ``state.origin``.
    """
    request = state.request
    return Job(
        request_id=job_id(state.request_id, number, 0),
        model=request.model,
        prompt_token_ids=(),
        sampling=replace(of_one_job(request.sampling), reasoning=state.reasoning),
        reply=state.origin,
        batch_frames=True,
        store_result=state.keep_result,
        tenant=state.tenant,
        user=request.user,
        session_id=request.session_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tier=state.tier,
        source=state.source,
        model_requested=request.model_requested or request.model,
        route_reason=request.route_reason,
        received_ns=state.created_ns,
        deadline_ns=state.deadline_ns,
        traceparent=state.traceparent,
        keep_transcript=keep_transcript,
        key_id=state.key_id,
        metadata=request.metadata,
        asked=state.asked,
        part=part_of(request, state.request_id, number),
    )


def bare_job(
    model: str,
    caller: Caller,
    request_id: str,
    tier: Tier,
    received_ns: int,
    deadline_ns: int,
    api: Api,
) -> Job:
    """Return a job over HTTP without its prompt: of a batch, of an input to embed, or of the
    gateway's own.
    """
    return Job(
        request_id=request_id,
        model=model,
        prompt_token_ids=(),
        tenant=caller.tenant,
        key_id=caller.key_id,
        tier=tier,
        source=Source.HTTP,
        model_requested=model,
        received_ns=received_ns,
        deadline_ns=deadline_ns,
        asked=Asked(api=api),
    )


class JobMaker:
    """Maker of jobs: tokenises prompts within the windows of model and caller. Raises MillraceError
    for requests that cannot be honoured, including chat templates of requests unless
    ``trusts_templates``.
    """

    def __init__(
        self,
        tools: ToolCatalogue,
        seed_source: random.Random,
        prompts: PromptPool,
        *,
        trusts_templates: bool = False,
    ) -> None:
        self._trusts_templates = trusts_templates
        self._tools = tools
        self._seed_source = seed_source
        self._prompts = prompts

    async def jobs(
        self, base: Job, request: GenerationRequest, model: ServedModelLike, caller: Caller
    ) -> list[Job]:
        """Return a job for each choice of each prompt, ready for a worker; a beam search has one
        job for all its answers. Choices differ in their seeds only. ``base`` has the request's id
        and all fields that are not in the request.
        """
        jobs: list[Job] = []
        for place_in_ask, job in enumerate(_with_each_prompt(base, request)):
            try:
                first = await self.prepare(job, request, model, caller)
                await self._check_context(job, first, request, model, caller)
            except (ParameterError, ContextLengthError) as error:
                if not request.other_prompts or error.param.partition("[")[0] != PROMPT:
                    raise
                place = {PROMPT: f"{PROMPT}[{place_in_ask}]"}
                if isinstance(error, ParameterError):
                    raise respelled(error, place) from error
                error.param = in_words(error.param, place)
                raise
            seed = first.sampling.seed or 0
            for choice in range(request.jobs_per_prompt):
                if not jobs:
                    jobs.append(first)  # it has the request's own id already
                    continue
                sampling = first.sampling
                if choice:
                    sampling = replace(sampling, seed=(seed + choice) % (MAX_SEED + 1))
                number = len(jobs)
                request_id = job_id(base.request_id, number, 0)
                assert base.part is not None, "a request of several jobs has parts"
                part = replace(base.part, choice=number, shares_prompt=choice > 0)
                jobs.append(replace(first, request_id=request_id, sampling=sampling, part=part))
        return jobs

    async def prepare(
        self, job: Job, request: GenerationRequest, model: ServedModelLike, caller: Caller
    ) -> Job:
        """Return the job with token ids, within the windows of model and caller. Its notices name
        the constraints that its calls are not held to.
        """
        check_template(request.chat_template, is_trusted=self._trusts_templates)
        tools = self._tools_of(request)
        job = with_tools(job, request, model, tools)
        asked = replace(
            job.asked or Asked(),
            max_tokens=request.sampling.max_tokens,
            reads_calls=bool(tools) and model.tool_format is not None,
            must_call=request.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED),
        )
        job = replace(job, asked=asked)
        length = num_characters_with(request.chat_template, num_characters(job))
        prepare = partial(prepared, job, request, model, self._seed_source)
        job = await self._prompts.run(job.tenant, length, prepare)
        if caller.context_tokens is None:
            return job
        return _within_context(job, request.sampling.max_tokens, caller.context_tokens)

    async def _check_context(
        self,
        job: Job,
        prepared: Job,
        request: GenerationRequest,
        model: ServedModelLike,
        caller: Caller,
    ) -> None:
        """Raise TierContextError for a job that does not fit the caller's context; the error has
        the length of each part of the prompt.
        """
        size, wanted = caller.context_tokens, request.sampling.max_tokens
        num_prompt_tokens = len(prepared.prompt_token_ids or ())
        if size is None or num_prompt_tokens + (wanted or 1) <= size:
            return
        told = replace(job, tools=() if job.messages is None else self._tools_of(request))
        count = partial(model.prompt_parts, told, num_prompt_tokens)
        raise TierContextError(
            num_prompt_tokens,
            wanted,
            size,
            field=in_words(PROMPT if job.messages is None else "messages", request.words),
            parts=await self._prompts.run(job.tenant, num_characters(told), count),
            limit=f"Requests of tenant {caller.tenant} (tier {job.tier}) may hold {size} tokens "
            "with this API key.",
        )

    def _tools_of(self, request: GenerationRequest) -> tuple[ToolDefinition, ...]:
        if request.tool_choice.mode is ToolMode.NONE:
            return ()
        if not request.server_tools:
            return request.tools
        own = self._tools.definitions(request.server_tools)
        taken = {tool.name for tool in request.tools}
        for tool in own:
            if tool.name in taken:
                raise ParameterError(
                    "server_tools", f"server_tools and tools both have a tool {tool.name}."
                )
        return (*request.tools, *own)


def prompt_token_ids(jobs: Sequence[Job], request: GenerationRequest) -> PromptTokenIds:
    """Return the token ids of each prompt of the request of ``jobs``, if the request asked for
    them.
    """
    if not request.tells_token_ids:
        return ()
    return tuple(job.prompt_token_ids or () for job in jobs[:: request.jobs_per_prompt])


def _with_each_prompt(base: Job, request: GenerationRequest) -> list[Job]:
    jobs = [with_prompt(base, request)]
    for other in request.other_prompts:
        text, ids = (other, None) if isinstance(other, str) else (None, other)
        jobs.append(replace(base, prompt=text, prompt_token_ids=ids))
    return jobs


def _within_context(job: Job, wanted: int | None, context_tokens: int) -> Job:
    """Return the job with a completion of unstated length cut to the caller's context. A job that
    does not fit is refused when it is reserved.
    """
    sampling = job.sampling
    left = context_tokens - len(job.prompt_token_ids or ())
    if wanted is not None or left < 1 or (sampling.max_tokens or 0) <= left:
        return job
    return replace(job, sampling=replace(sampling, max_tokens=left))
