"""Which messages of a conversation fit into a context window. Pure: no clock, no store."""

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
    """A message, and how many tokens its text has for the model ``model`` (empty: not counted).
    What a chat template puts around it is not in the count."""

    message: ChatMessage
    num_tokens: int = 0
    model: str = ""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Room for prompt and completion together. ``max_tokens`` is what the completion may have;
    None: whatever is left, preferably ``reserve_tokens``."""

    num_tokens: int
    max_tokens: int | None
    reserve_tokens: int

    @property
    def wanted_prompt_tokens(self) -> int:
        """The longest prompt that leaves the completion enough room."""
        completion = self.max_tokens
        if completion is None:
            # A small window is not given away to a completion that nobody bounded.
            completion = min(self.reserve_tokens, self.num_tokens // 4)
        return self.num_tokens - completion

    @property
    def longest_prompt_tokens(self) -> int:
        """The longest prompt that the model takes."""
        return self.num_tokens - (1 if self.max_tokens is None else self.max_tokens)


class Fitted(NamedTuple):
    """A prompt, its length, how many messages were left out, and whether the summary stands in
    it."""

    messages: tuple[ChatMessage, ...]
    num_prompt_tokens: int
    num_dropped: int
    with_summary: bool


def count(
    messages: Iterable[Counted], model: str, num_tokens: Callable[[str], int]
) -> tuple[Counted, ...]:
    """The messages, counted for ``model``; ``num_tokens`` is asked for those that are not yet."""
    return tuple(
        counted
        if counted.model == model
        else Counted(counted.message, num_tokens(text_of(counted.message)), model)
        for counted in messages
    )


def count_for(
    model: ServedModelLike, name: str, messages: Iterable[Counted]
) -> tuple[Counted, ...]:
    """The messages, counted for ``model``, which is called ``name``."""
    return count(messages, name, lambda text: len(model.tokenizer.encode(text, False)))


def window_of(
    request: GenerationRequest, model: ServedModelLike, caller: Caller, reserve_tokens: int
) -> Window:
    """The model's window, or the caller's if that is smaller."""
    num_tokens = model.context_window_tokens
    return Window(
        num_tokens=min(num_tokens, caller.context_tokens or num_tokens),
        max_tokens=request.sampling.max_tokens,
        reserve_tokens=reserve_tokens,
    )


def text_of(message: ChatMessage) -> str:
    """All that the model reads of a message."""
    calls = (f"{call.name} {call.arguments}" for call in message.tool_calls)
    return "\n".join([message.content, *calls])


def turns(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """The indices of each turn: a user's message and all that follows until the next one, so that
    the result of a tool is never apart from its call. System messages are in none."""
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
    """Both as they stand in a prompt: system messages that a turn begins with take the place of
    those that the history began with, as a client sends them anew with each turn."""
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
    """The newest part of ``history`` and all of ``turn`` as a prompt that fits the window.

    System messages and what belongs to the same turn as ``turn`` stay; of the rest, the oldest
    turns are left out whole until the prompt, as ``encode`` tells its tokens, is short enough. The
    summary stands before what is kept. It is left out only if it would not fit, or if the model's
    template refuses it. What must stay is given back even if it does not fit: whoever makes a job
    of it refuses that, as any prompt that is too long. Raises what ``encode`` raises.
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

    # What surely does not fit is not even encoded.
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
    """The conversation as it goes to the template.

    Many templates take one system message at most, in the first place: so those that lead, brought
    together by what was left out, and the summary become one.
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
    """How many system messages are in front."""
    return sum(1 for _ in itertools.takewhile(lambda message: message.role == SYSTEM, messages))


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
