"""Fitting of a conversation's messages into a context window. Pure: no clock, no store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from millrace.gateway.models import ServedModelLike
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.tokenizers.prompt_pool import PromptPool
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolDefinition, ToolMode

SYSTEM = "system"
_SUMMARY_HEADING = "Summary of the earlier conversation:\n"

Encode = Callable[[Sequence[ChatMessage]], Sequence[int]]


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """Message with the number of tokens of its text for ``model`` (empty: not counted). The chat
    template's tokens are not in the count.
    """

    message: ChatMessage
    num_tokens: int = 0
    model: str = ""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Room for prompt and completion together. ``max_tokens`` is the completion's maximum; None:
    the rest of the window, preferably ``reserve_tokens``.
    """

    num_tokens: int
    max_tokens: int | None
    reserve_tokens: int

    @property
    def wanted_prompt_tokens(self) -> int:
        """Return the longest prompt that leaves enough room for the completion."""
        completion = self.max_tokens
        if completion is None:
            # A small window is not given away to an unbounded completion.
            completion = min(self.reserve_tokens, self.num_tokens // 4)
        return self.num_tokens - completion

    @property
    def longest_prompt_tokens(self) -> int:
        """Return the longest prompt that the model takes."""
        return self.num_tokens - (1 if self.max_tokens is None else self.max_tokens)


class Fitted(NamedTuple):
    """Prompt, its length, the number of messages that were left out, and whether it has the
    summary.
    """

    messages: tuple[ChatMessage, ...]
    num_prompt_tokens: int
    num_dropped: int
    with_summary: bool


def count(
    messages: Iterable[Counted], model: str, num_tokens: Callable[[str], int]
) -> tuple[Counted, ...]:
    """Return the messages, counted for ``model``. ``num_tokens`` counts messages that are not
    counted for it yet.
    """
    return tuple(
        counted
        if counted.model == model
        else Counted(counted.message, num_tokens(text_of(counted.message)), model)
        for counted in messages
    )


def count_for(
    model: ServedModelLike, name: str, messages: Iterable[Counted]
) -> tuple[Counted, ...]:
    """Return the messages, counted for ``model``, whose name is ``name``."""
    return count(messages, name, lambda text: len(model.tokenizer.encode(text, False)))


def window_of(
    request: GenerationRequest, model: ServedModelLike, caller: Caller, reserve_tokens: int
) -> Window:
    """Return the model's window, or the caller's if that is smaller."""
    num_tokens = model.context_window_tokens
    return Window(
        num_tokens=min(num_tokens, caller.context_tokens or num_tokens),
        max_tokens=request.sampling.max_tokens,
        reserve_tokens=reserve_tokens,
    )


def text_of(message: ChatMessage) -> str:
    """Return all text of a message that the model reads."""
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    return "\n".join([message.content, *calls])


def turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """Return the indices of each turn: a user's message and all messages until the next one, so
    that a tool's result stays with its call. System messages are in none.
    """
    found: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.role == SYSTEM:
            continue
        if message.role == "user" or not found:
            found.append([])
        found[-1].append(index)
    return found


def continue_with(
    history: Sequence[Counted], turn: Sequence[Counted]
) -> tuple[Sequence[Counted], Sequence[Counted]]:
    """Return both as they stand in a prompt: system messages at the start of a turn replace the
    history's leading system messages, as a client sends them anew with each turn.
    """
    num_new = num_leading(one.message for one in turn)
    if num_new == 0:
        return history, turn
    num_replaced = num_leading(one.message for one in history)
    return [*turn[:num_new], *history[num_replaced:]], turn[num_new:]


def fit(
    history: Sequence[Counted],
    turn: Sequence[Counted],
    summary: str,
    window: Window,
    encode: Encode,
) -> Fitted:
    """Return the newest part of ``history`` and all of ``turn`` as a prompt that fits the window.

    System messages and messages of the same turn as ``turn`` stay. Of the rest, the oldest turns
    are left out whole until the prompt, tokenised by ``encode``, is short enough. The summary
    stands before the remaining messages. It is left out only if it would not fit, or if the model's
    template refuses it. Messages that must stay are returned even if they do not fit: the job maker
    refuses them like any long prompt. Raises the errors of ``encode``.
    """
    everything = [*history, *turn]
    droppable = [
        one for one in turns([counted.message for counted in everything]) if one[-1] < len(history)
    ]
    limit = window.wanted_prompt_tokens
    num_turns = 0
    dropped: set[int] = set()

    def drop(excess: float, overhead: float) -> None:
        nonlocal num_turns
        while excess > 0 and num_turns < len(droppable):
            oldest = droppable[num_turns]
            num_turns += 1
            dropped.update(oldest)
            excess -= sum(everything[index].num_tokens + overhead for index in oldest)

    # Turns that surely do not fit are dropped before encoding.
    drop(sum(counted.num_tokens for counted in everything) - limit, 0.0)
    while True:
        kept = [one for index, one in enumerate(everything) if index not in dropped]
        messages = _compose([one.message for one in kept], summary, joined=bool(dropped))
        try:
            num_tokens = len(encode(messages))
        except ParameterError:
            if not summary:
                raise
            # Some templates take no system message: then the window slides without a summary.
            summary = ""
            continue
        excess = num_tokens - limit
        if excess <= 0:
            break
        if num_turns < len(droppable):
            around = num_tokens - sum(one.num_tokens for one in kept)
            drop(excess, max(0.0, around / len(kept)))
        elif summary and num_tokens > window.longest_prompt_tokens:
            summary = ""
        else:
            break
    return Fitted(messages, num_tokens, len(dropped), bool(summary))


def _compose(
    messages: Sequence[ChatMessage], summary: str, *, joined: bool
) -> tuple[ChatMessage, ...]:
    """Return the messages for the template.

    Many templates take at most one system message, in the first place. So the leading system
    messages, which become adjacent when turns are left out, and the summary are joined.
    """
    if not summary and not joined:
        return tuple(messages)
    num_systems = num_leading(messages)
    texts = [message.content for message in messages[:num_systems]]
    if summary:
        texts.append(_SUMMARY_HEADING + summary)
    if len(texts) < 2 and not summary:
        return tuple(messages)
    return (ChatMessage(SYSTEM, "\n\n".join(texts)), *messages[num_systems:])


def num_leading(messages: Iterable[ChatMessage]) -> int:
    """Return the number of leading system messages."""
    return sum(1 for _ in itertools.takewhile(lambda message: message.role == SYSTEM, messages))


async def fit_window(
    request: GenerationRequest,
    tools: Sequence[ToolDefinition],
    model: ServedModelLike,
    caller: Caller,
    config: GatewayConfig,
    prompts: PromptPool,
) -> GenerationRequest:
    """Return the request with as many of its newest messages as fit the model's window and the
    caller's, beside ``tools``. System messages and the last turn stay, even if they do not fit.
    """
    work = partial(_fit, request, tools, model, caller, config)
    return await prompts.run(caller.tenant, request.num_prompt_characters, work)


async def num_input_tokens(
    request: GenerationRequest,
    tools: Sequence[ToolDefinition],
    model: ServedModelLike,
    caller: Caller,
    prompts: PromptPool,
) -> int:
    """Return the number of prompt tokens of ``request``, with ``tools`` if the model may call
    any.
    """
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
