"""The one place where requests become jobs, ready for a worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from millrace.bus.tenancy.errors import TierContextError
from millrace.gateway.models import ServedModelLike
from millrace.gateway.request.index import PromptTokenIds, RequestState
from millrace.gateway.tenancy.caller import Caller
from millrace.gateway.tools.catalogue import ToolCatalogue
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import in_words, respelled
from millrace.registry.tokenizers.prompt_pool import PromptPool, num_characters, num_characters_with
from millrace.registry.tool_formats import Dropped, call_grammar
from millrace.schemas.errors import ContextLengthError, ParameterError
from millrace.schemas.jobs import Job, Source, Tier
from millrace.schemas.notices import Notice, NoticeCode, Notices, bounded, notice
from millrace.schemas.sampling import MAX_SEED, SamplingOptions
from millrace.schemas.tools import ToolDefinition, ToolMode

_PROMPT = "prompt"
# The field that refusals of an answer's schema name, whatever field the caller wrote it in.
_RESPONSE_FORMAT = "response_format"


def job_id(request_id: str, choice: int, round_: int) -> str:
    """The id of the job of one round of one choice; the first round of the first has the request's
    own."""
    return request_id + (f".{choice}" if choice else "") + (f"-r{round_}" if round_ else "")


def job_of(state: RequestState, request_id: str, *, keep_transcript: bool) -> Job:
    """The job of an accepted request without its prompt, whose frames go to ``state.origin``."""
    request = state.request
    return Job(
        request_id=request_id,
        model=request.model,
        prompt_token_ids=(),
        sampling=replace(_of_one_job(request.sampling), reasoning=state.reasoning),
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
    )


def bare_job(
    model: str, caller: Caller, request_id: str, tier: Tier, received_ns: int, deadline_ns: int
) -> Job:
    """A job over HTTP without its prompt: of a batch, of an input to embed, or of the gateway's
    own."""
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
    )


class JobMaker:
    """Tokenises, within the windows of model and caller. Raises MillraceError for what cannot be
    honoured, which includes chat templates of requests unless ``trusts_templates``."""

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
        """One for each choice of each prompt, ready for a worker; for all that a beam search finds
        there is one. Choices differ in their seeds only; ``base`` says everything that is not in
        the ask, and the request's id."""
        jobs: list[Job] = []
        for number, job in enumerate(_with_each_prompt(base, request)):
            try:
                first = await self.prepare(job, request, model, caller)
                await self._check_context(job, first, request, model, caller)
            except (ParameterError, ContextLengthError) as error:
                if not request.other_prompts or error.param.partition("[")[0] != _PROMPT:
                    raise
                place = {_PROMPT: f"{_PROMPT}[{number}]"}
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
                request_id = job_id(base.request_id, len(jobs), 0)
                jobs.append(replace(first, request_id=request_id, sampling=sampling))
        return jobs

    async def prepare(
        self, job: Job, request: GenerationRequest, model: ServedModelLike, caller: Caller
    ) -> Job:
        """The job with token ids, within the windows of model and caller; its notices name the
        constraints that its calls are not held to."""
        if request.truncate_prompt_tokens is not None:
            job = replace(job, truncate_prompt_tokens=request.truncate_prompt_tokens)
        self.check_template(request.chat_template)
        tools = self._tools_of(request)
        if tools and request.chat_template is not None and model.tool_format is None:
            raise ParameterError(
                "tools", "tools need a model with a chat template, not only one of the request's."
            )
        try:
            sampling, notices = _sampling(request, model, tools)
        except ParameterError as error:
            if error.param != _RESPONSE_FORMAT or not request.grammar_field:
                raise
            raise ParameterError(request.grammar_field, error.message) from error
        notices = tuple(one for one in notices if one not in job.notices)
        if notices:
            job = replace(job, notices=bounded((*job.notices, *notices)))
        with_tools = tools if job.messages is not None else ()
        if with_tools is not job.tools or sampling is not job.sampling:
            job = replace(job, sampling=sampling, tools=with_tools)
        try:
            prepare = partial(_prepared, model, request.chat_template, job, self._seed_source)
            length = num_characters_with(request.chat_template, num_characters(job))
            job = await self._prompts.run(job.tenant, length, prepare)
        except ContextLengthError as error:
            error.param = in_words(error.param, request.words)
            raise
        except ParameterError as error:
            # Token ids come in the field that also takes text.
            words = {"prompt_token_ids": _PROMPT, **request.words}
            raise respelled(error, words) from error
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
        """Raises TierContextError, which says which part of the prompt is how long, for a job that
        does not fit the caller's context."""
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
            field=in_words(_PROMPT if job.messages is None else "messages", request.words),
            parts=await self._prompts.run(job.tenant, num_characters(told), count),
            limit=f"Requests of tenant {caller.tenant} (tier {job.tier}) may hold {size} tokens "
            "with this API key.",
        )

    def check_template(self, source: str | None) -> None:
        """Raises ParameterError("chat_template") for one, unless requests may bring theirs."""
        if source is not None and not self._trusts_templates:
            raise ParameterError(
                "chat_template",
                "chat_template is not taken from requests here, unless the gateway's setting "
                "trust_request_chat_template is on.",
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


def with_prompt(job: Job, request: GenerationRequest) -> Job:
    return replace(
        job,
        prompt=request.prompt,
        messages=request.messages,
        prompt_token_ids=request.prompt_token_ids,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        prediction=request.prediction,
        notices=request.notices,
    )


def prompt_token_ids(jobs: Sequence[Job], request: GenerationRequest) -> PromptTokenIds:
    """Of each prompt of the request that ``jobs`` are of, if they are to be told."""
    if not request.tells_token_ids:
        return ()
    return tuple(job.prompt_token_ids or () for job in jobs[:: request.jobs_per_prompt])


def _with_each_prompt(base: Job, request: GenerationRequest) -> list[Job]:
    jobs = [with_prompt(base, request)]
    for other in request.other_prompts:
        text, ids = (other, None) if isinstance(other, str) else (None, other)
        jobs.append(replace(base, prompt=text, prompt_token_ids=ids))
    return jobs


def _sampling(
    request: GenerationRequest, model: ServedModelLike, tools: tuple[ToolDefinition, ...]
) -> tuple[SamplingOptions, Notices]:
    """Return the sampling options of one job, and notices of the constraints that they do not keep.
    A forced call becomes a grammar, and so does the format of a custom tool. The format is not
    kept if the tools together have no grammar."""
    sampling = _of_one_job(request.sampling)
    if not tools or model.tool_format is None:
        return sampling, ()
    choice, parallel = request.tool_choice, request.parallel_tool_calls
    patterns, answer = request.freeform_tools, sampling.grammar
    make = partial(call_grammar, model.tool_format, tools, choice, parallel, answer)
    notices: list[Notice] = []
    dropped = Dropped()
    try:
        grammar = make(patterns, dropped)
    except ParameterError as error:
        without = dict.fromkeys(patterns, "")
        if choice.mode is not ToolMode.AUTO or patterns == without:
            raise
        dropped = Dropped()
        grammar = make(without, dropped)
        notices.append(notice(NoticeCode.GRAMMAR_NOT_KEPT, error.param, error.message))
    notices += (
        notice(NoticeCode.SCHEMA_KEYWORD_DROPPED, "tools", str(keyword))
        for keyword in dropped.keywords
    )
    return sampling if grammar is None else replace(sampling, grammar=grammar), tuple(notices)


def _prepared(
    model: ServedModelLike, chat_template: str | None, job: Job, seed_source: random.Random
) -> Job:
    if chat_template is not None:
        model = model.with_chat_template(chat_template)
    return model.prepare(job, seed_source)


def _of_one_job(sampling: SamplingOptions) -> SamplingOptions:
    is_one = sampling.n == sampling.num_answers
    return sampling if is_one else replace(sampling, n=1)


def _within_context(job: Job, wanted: int | None, context_tokens: int) -> Job:
    """The job with a completion of no stated length cut to the caller's context. One that does not
    fit is refused when it is reserved."""
    sampling = job.sampling
    left = context_tokens - len(job.prompt_token_ids or ())
    if wanted is not None or left < 1 or (sampling.max_tokens or 0) <= left:
        return job
    return replace(job, sampling=replace(sampling, max_tokens=left))
