"""From an ask to the jobs that answer it, ready for a worker."""

from __future__ import annotations

import random
from functools import partial

from msgspec.structs import replace

from gateway.request.context import ToolsLike
from gateway.request.models import ServedModelLike
from gateway.request.parsing import Ask
from gateway.tenancy.caller import Caller
from registry.tokenizers.prompt_pool import PromptPool, num_characters
from registry.tool_formats import call_grammar
from schemas.errors import ParameterError
from schemas.jobs import Job
from schemas.sampling import MAX_SEED, SamplingParams
from schemas.tools import ToolDefinition, ToolMode


def job_id(request_id: str, choice: int, round_: int) -> str:
    """The id of the job of one round of one choice; the first round of the first has the request's
    own."""
    return request_id + (f".{choice}" if choice else "") + (f"-r{round_}" if round_ else "")


class JobMaker:
    """Tokenises, within the windows of model and caller. Raises MillraceError for what cannot be
    honoured."""

    def __init__(self, tools: ToolsLike, seed_source: random.Random, prompts: PromptPool) -> None:
        self._tools = tools
        self._seed_source = seed_source
        self._prompts = prompts

    async def jobs(self, base: Job, ask: Ask, model: ServedModelLike, caller: Caller) -> list[Job]:
        """One for each choice of each prompt, ready for a worker. Choices differ in their seeds
        only; ``base`` says everything that is not in the ask, and the request's id."""
        jobs: list[Job] = []
        for job in _with_each_prompt(base, ask):
            first = await self.prepare(job, ask, model, caller)
            seed = first.sampling.seed or 0
            for choice in range(ask.sampling.n):
                sampling = first.sampling
                if choice:
                    sampling = replace(sampling, seed=(seed + choice) % (MAX_SEED + 1))
                request_id = job_id(base.request_id, len(jobs), 0)
                jobs.append(replace(first, request_id=request_id, sampling=sampling))
        return jobs

    async def prepare(self, job: Job, ask: Ask, model: ServedModelLike, caller: Caller) -> Job:
        """The job with token ids, within the windows of model and caller."""
        tools = self._tools_of(ask)
        sampling = _sampling(ask, model, tools)
        with_tools = tools if job.messages is not None else ()
        job = replace(job, sampling=sampling, tools=with_tools)
        try:
            prepare = partial(model.prepare, job, self._seed_source)
            job = await self._prompts.run(job.tenant, num_characters(job), prepare)
        except ParameterError as error:
            if error.param != "prompt_token_ids":
                raise
            # Token ids come in the field that also takes text.
            raise ParameterError("prompt", error.message) from error
        job = replace(job, tools=())
        if caller.context_tokens is None:
            return job
        return _within_context(job, ask.sampling.max_tokens, caller.context_tokens)

    def _tools_of(self, ask: Ask) -> tuple[ToolDefinition, ...]:
        if ask.tool_choice.mode is ToolMode.NONE:
            return ()
        if not ask.server_tools:
            return ask.tools
        own = self._tools.definitions(ask.server_tools)
        taken = {tool.name for tool in ask.tools}
        for tool in own:
            if tool.name in taken:
                raise ParameterError(
                    "server_tools", f"server_tools and tools both have a tool {tool.name}."
                )
        return (*ask.tools, *own)


def with_prompt(job: Job, ask: Ask) -> Job:
    return replace(
        job, prompt=ask.prompt, messages=ask.messages, prompt_token_ids=ask.prompt_token_ids
    )


def _with_each_prompt(base: Job, ask: Ask) -> list[Job]:
    jobs = [with_prompt(base, ask)]
    for other in ask.other_prompts:
        text, ids = (other, None) if isinstance(other, str) else (None, other)
        jobs.append(replace(base, prompt=text, prompt_token_ids=ids))
    return jobs


def _sampling(
    ask: Ask, model: ServedModelLike, tools: tuple[ToolDefinition, ...]
) -> SamplingParams:
    """What one choice is drawn with; a call that is demanded is a grammar."""
    sampling = ask.sampling if ask.sampling.n == 1 else replace(ask.sampling, n=1)
    if not tools or model.tool_format is None:
        return sampling
    grammar = call_grammar(
        model.tool_format, tools, ask.tool_choice, ask.parallel_tool_calls, sampling.grammar
    )
    return sampling if grammar is None else replace(sampling, grammar=grammar)


def _within_context(job: Job, wanted: int | None, context_tokens: int) -> Job:
    """The job with a completion of no stated length cut to the caller's context. One that does not
    fit is refused when it is reserved."""
    sampling = job.sampling
    left = context_tokens - len(job.prompt_token_ids or ())
    if wanted is not None or left < 1 or (sampling.max_tokens or 0) <= left:
        return job
    return replace(job, sampling=replace(sampling, max_tokens=left))
