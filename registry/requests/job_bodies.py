"""Body of a job that a service has published: parsed like an HTTP body, and made into a job that a
worker can run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from millrace.registry.json_schemas.walk import with_whole_counts
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.offered.chat_tools import CUSTOM, FUNCTION
from millrace.registry.requests.parsing import parse_chat, parse_completion
from millrace.registry.requests.ready_jobs import (
    PreparingModel,
    check_template,
    is_unheld,
    prepared,
    with_prompt,
    with_tools,
)
from millrace.runtime.json.tolerant import (
    check_plain,
    tolerated,
    whole_items,
    without_nulls,
)
from millrace.schemas.chat.tools import CustomTool, FunctionTool
from millrace.schemas.errors import InvalidJsonError, ParameterError
from millrace.schemas.jobs import AnswerForm, Job
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.tools import ToolDefinition, ToolMode

_CHAT = msgspec.json.Decoder(ChatCompletionRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_TOOLS = {FUNCTION: FunctionTool, CUSTOM: CustomTool}
# Fields with JSON schemas, besides tools.
_SCHEMAS = (
    ("response_format", "json_schema", "schema"),
    ("guided_json",),
    ("json_schema",),
    ("structured_outputs", "json"),
)
# Fields that a job cannot have, with the advice for each.
_BEYOND = {
    "session_id": "A job keeps no conversation: send all of its messages.",
    "session_keep": "A job keeps no conversation: send all of its messages.",
    "server_tools": "The gateway runs these tools, and it does not see a job: send the request to "
    "/v1/chat/completions, or run the tools yourself.",
    "use_beam_search": "Give it in sampling, in the nested form of a job.",
    "echo": "The publisher of a job has its prompt.",
    "return_token_ids": "Frames and result of a job have token_ids anyway.",
}


def read_body(job: Job) -> GenerationRequest:
    """Return the request in the body of a job.

    Null means not set, and a float without a fraction is accepted as an integer.

    Raises:
        ParameterError: a field is invalid; names it.
        InvalidJsonError: the body is neither JSON nor MessagePack.
    """
    try:
        body = _decoded(job.body)
        if "messages" in body:
            chat = decode(_CHAT, _as_json(body, ChatCompletionRequest))
            _check_within(chat, job)
            return parse_chat(replace(chat, stream=None, stream_options=None))
        completion = decode(_COMPLETION, _as_json(body, CompletionRequest))
    except RecursionError as error:
        raise InvalidJsonError("The body is nested too deeply.") from error
    _check_within(completion, job)
    request = replace(completion, stream=None, stream_options=None)
    return parse_completion(request, default_max_tokens=None)


def prepare_body(
    job: Job, model: PreparingModel, seed_source: random.Random, *, trusts_templates: bool
) -> Job:
    """Return the job without its body: with token ids, and with the form for splitting its answer.
    Raises MillraceError.
    """
    request = read_body(job)
    check_template(request.chat_template, is_trusted=trusts_templates)
    tools = () if request.tool_choice.mode is ToolMode.NONE else request.tools
    bare = replace(
        job,
        body=b"",
        prompt_token_ids=(),
        user=request.user,
        cache_salt=request.cache_salt,
        priority=request.priority,
        metadata=request.metadata,
        answer=None if request.messages is None else _form(request, model, tools),
    )
    job = with_tools(with_prompt(bare, request), request, model, tools)
    return prepared(job, request, model, seed_source)


def _form(
    request: GenerationRequest, model: PreparingModel, tools: tuple[ToolDefinition, ...]
) -> AnswerForm:
    return AnswerForm(
        tools=tools,
        freeform=tuple(request.freeform_tools),
        must_call=request.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED),
        is_unheld=is_unheld(request, model.engine_kind),
        include_reasoning=request.include_reasoning,
    )


def _decoded(body: bytes) -> dict[str, Any]:
    """Decode a body. JSON begins with ``{``, which no object in MessagePack does."""
    value: dict[str, Any]
    if body.startswith(b"{"):
        value = decode(msgspec.json.Decoder(dict[str, Any]), body)
        return value
    try:
        value = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJsonError(f"The body is not valid MessagePack: {error}.") from error
    return value


def _as_json(body: dict[str, Any], kind: type[msgspec.Struct]) -> bytes:
    """Return the body as JSON, with the habits of other languages' serializers resolved."""
    body = tolerated(body, kind)
    if isinstance(body.get("tools"), list):
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body["tools"])]
    if "tool_choice" in body:
        body["tool_choice"] = without_nulls(body["tool_choice"])
    for path in _SCHEMAS:
        _change_at(body, path, with_whole_counts)
    if "prompt" in body:
        body["prompt"] = whole_items(body["prompt"], "prompt")
    return msgspec.json.encode(body)


def _tool(tool: Any, where: str) -> Any:
    kind = None
    if isinstance(tool, dict):
        kind = _TOOLS.get(str(tool.get("type") or FUNCTION))
    if kind is None:
        return check_plain(tool, where)
    tool = tolerated(tool, kind, where)
    _change_at(tool, ("function", "parameters"), with_whole_counts)
    return tool


def _change_at(value: Any, path: Sequence[str], change: Callable[[Any], Any]) -> None:
    """Change the value at the path, if there is one."""
    *before, last = path
    for name in before:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, dict) and last in value:
        value[last] = change(value[last])


def _check_within(request: ChatCompletionRequest | CompletionRequest, job: Job) -> None:
    """Raise ParameterError, naming the field, for a field that no job can have."""
    for name, advice in _BEYOND.items():
        if getattr(request, name, None):
            raise ParameterError(name, f"{name} is not supported in a job. {advice}")
    if (request.n or 1) > 1:
        raise ParameterError("n", "n must be 1: a job makes one completion. Publish n jobs.")
    if request.service_tier not in (None, "auto", "default", job.tier.value):
        raise ParameterError(
            "service_tier",
            f"service_tier must be {job.tier.value}, the tier of the job's subject, or absent.",
        )
    if isinstance(request, CompletionRequest) and _has_several(request.prompt):
        raise ParameterError(
            "prompt", "prompt must be one text or one list of token ids. Publish a job for each."
        )


def _has_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is not int
