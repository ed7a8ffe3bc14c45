"""``truncation: auto``: a conversation loses its oldest turns until it fits the window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from millrace.gateway.models import ServedModelLike
from millrace.gateway.sessions.context_window import Counted, count_for, fit, window_of
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.config import GatewayConfig
from millrace.schemas.tools import ToolDefinition, ToolMode


async def fit_window(
    request: GenerationRequest,
    tools: Sequence[ToolDefinition],
    model: ServedModelLike,
    caller: Caller,
    config: GatewayConfig,
    prompts: PromptPool,
) -> GenerationRequest:
    """The ask with as many of its newest messages as fit the model's window and the caller's,
    beside ``tools``. System messages and the last turn stay, even if they do not fit."""
    work = partial(_fit, request, tools, model, caller, config)
    return await prompts.run(caller.tenant, request.num_prompt_characters, work)


async def num_input_tokens(
    request: GenerationRequest,
    tools: Sequence[ToolDefinition],
    model: ServedModelLike,
    caller: Caller,
    prompts: PromptPool,
) -> int:
    """How many tokens the prompt of ``request`` has, beside ``tools`` if the model may call any."""
    told = () if request.tool_choice.mode is ToolMode.NONE else tools

    def count() -> int:
        token_ids = model.tokenizer.encode_chat(
            request.messages or (),
            told,
            continue_final_message=request.continue_final_message,
            arguments=request.chat_template_kwargs,
        )
        return len(token_ids)

    return await prompts.run(caller.tenant, request.num_prompt_characters, count)


def _fit(
    request: GenerationRequest,
    tools: Sequence[ToolDefinition],
    model: ServedModelLike,
    caller: Caller,
    config: GatewayConfig,
) -> GenerationRequest:
    assert request.messages
    counted = count_for(model, request.model, map(Counted, request.messages))
    fitted = fit(
        counted[:-1],
        counted[-1:],
        "",
        window_of(request, model, caller, config.session_reserve_tokens),
        lambda messages: model.tokenizer.encode_chat(
            messages, tools, arguments=request.chat_template_kwargs
        ),
    )
    return msgspec.structs.replace(request, messages=fitted.messages)
