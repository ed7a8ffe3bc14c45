"""Preparation of jobs: from a generation request to a job with prompt, tools, grammar and token
ids.

The gateway does this for requests over HTTP and WebSocket, the scheduler for jobs from NATS.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Protocol, Self

from msgspec.structs import replace

from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.message_fields import in_words, respelled
from millrace.registry.tool_formats import Dropped, call_grammar
from millrace.schemas.engines import EngineKind, can_hold_calls
from millrace.schemas.errors import ContextLengthError, ParameterError
from millrace.schemas.jobs import Job
from millrace.schemas.notices import Notice, NoticeCode, Notices, bounded, notice
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolDefinition, ToolFormat, ToolMode

PROMPT = "prompt"
# The field that schema errors of an answer name, independent of the field that the caller used.
_RESPONSE_FORMAT = "response_format"


def is_unheld(request: GenerationRequest, kind: EngineKind) -> bool:
    """Return whether calls of ``request`` are unconstrained because an engine of this kind cannot
    constrain them.
    """
    is_free = request.tool_choice.mode is ToolMode.AUTO and request.sampling.grammar is None
    return is_free and not can_hold_calls(kind)


def unheld_calls(
    sampling: SamplingOptions, tool_format: ToolFormat, request: GenerationRequest, kind: EngineKind
) -> tuple[SamplingOptions, Notices]:
    """Return the sampling options without a grammar, and notices of the constraints that are not
    enforced.

    If calls are not parallel, one call ends the completion.
    """
    if not request.parallel_tool_calls:
        sampling = replace(sampling, one_call=tool_format)
    why = f"the {kind} engine of this model does not support grammars for calls"
    notices: list[Notice] = []
    if any(tool.strict for tool in request.tools):
        notices.append(notice(NoticeCode.STRICT_NOT_ENFORCED, "tools", why))
    if any(request.freeform_tools.values()):
        notices.append(notice(NoticeCode.GRAMMAR_NOT_KEPT, "tools", why))
    return sampling, tuple(notices)


class PreparingModel(Protocol):
    """Part of ``registry.served.ServedModel`` that makes jobs ready."""

    @property
    def engine_kind(self) -> EngineKind: ...

    @property
    def tool_format(self) -> ToolFormat | None: ...

    def with_chat_template(self, source: str) -> Self:
        """Return the model with the template of a request. Raises
        ParameterError("chat_template").
        """

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        """Return the job with token ids, max_tokens and seed. Raises MillraceError for bad
        input.
        """


def check_template(source: str | None, *, is_trusted: bool) -> None:
    """Raise ParameterError("chat_template") for a template in a request, unless it is trusted."""
    if source is not None and not is_trusted:
        raise ParameterError(
            "chat_template",
            "chat_template is not allowed in requests, unless the gateway's setting "
            "trust_request_chat_template is on.",
        )


def with_prompt(job: Job, request: GenerationRequest) -> Job:
    """Return the job with the prompt of a request and the options for reading it."""
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


def with_tools(
    job: Job,
    request: GenerationRequest,
    model: PreparingModel,
    tools: tuple[ToolDefinition, ...],
) -> Job:
    """Return the job with the ``tools`` that the model knows and the request's sampling options.

    Its notices name the constraints that are not enforced on its calls.

    Raises:
        ParameterError: the tools or the grammar are invalid.
    """
    if request.truncate_prompt_tokens is not None:
        job = replace(job, truncate_prompt_tokens=request.truncate_prompt_tokens)
    if tools and request.chat_template is not None and model.tool_format is None:
        raise ParameterError(
            "tools",
            "tools need a model with its own chat template; the request's template is not enough.",
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
    told = tools if job.messages is not None else ()
    if told is not job.tools or sampling is not job.sampling:
        job = replace(job, sampling=sampling, tools=told)
    return job


def prepared(
    job: Job, request: GenerationRequest, model: PreparingModel, seed_source: random.Random
) -> Job:
    """Return the job with token ids, within the model's window. Takes long for a long prompt.

    Raises:
        MillraceError: the job is invalid. A ParameterError names the field as the request's caller
            does.
    """
    # Token ids are in the field that also takes text.
    words = {"prompt_token_ids": PROMPT, "grammar": request.demand_field, **request.words}
    try:
        if request.chat_template is not None:
            model = model.with_chat_template(request.chat_template)
        ready = model.prepare(job, seed_source)
    except ContextLengthError as error:
        error.param = in_words(error.param, request.words)
        raise
    except ParameterError as error:
        raise respelled(error, words) from error
    return _with_own_names(ready, job.notices, words)


def _with_own_names(job: Job, earlier: Notices, words: Mapping[str, str]) -> Job:
    """Return the job with the caller's field names in notices beyond ``earlier``."""
    if job.notices == earlier:
        return job
    named = [
        one if one in earlier else replace(one, param=in_words(one.param, words))
        for one in job.notices
    ]
    return replace(job, notices=tuple(named))


def of_one_job(sampling: SamplingOptions) -> SamplingOptions:
    """Return the sampling options of each job of a request's choices."""
    is_one = sampling.n == sampling.num_answers
    return sampling if is_one else replace(sampling, n=1)


def _sampling(
    request: GenerationRequest, model: PreparingModel, tools: tuple[ToolDefinition, ...]
) -> tuple[SamplingOptions, Notices]:
    """Return the sampling options of one job, and notices of the constraints that are not enforced.

    A forced call becomes a grammar, and so does the format of a custom tool. The format is not
    enforced if the tools together have no grammar.
    """
    sampling = of_one_job(request.sampling)
    if not tools or model.tool_format is None:
        return sampling, ()
    if is_unheld(request, model.engine_kind):
        return unheld_calls(sampling, model.tool_format, request, model.engine_kind)
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
