"""Token counts of the parts of a prompt, for the error of a prompt that does not fit."""

from __future__ import annotations

import math

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.context_length import LongestMessage, PromptParts
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, Job

# Number of characters that are tokenized; the tokens of a longer text are extrapolated from its
# beginning.
COUNTED_CHARACTERS = 65_536
_SYSTEM = "system"
_PLACEHOLDER = "a"


def prompt_parts(
    tokenizer: Tokenizer, job: Job, num_prompt_tokens: int | None
) -> PromptParts | None:
    """Count the tokens of the job's tools, its system messages and its longest message.

    At most ``COUNTED_CHARACTERS`` of each are tokenized. ``num_prompt_tokens`` is the number for
    the whole prompt; None if unknown. Returns None for a prompt without parts: one message, or a
    text.
    """
    messages = job.messages
    if not messages or (len(messages) == 1 and not job.tools):
        return None
    tool_tokens = _tool_tokens(tokenizer, job) if job.tools else 0
    system = "".join(one.content for one in messages if one.role == _SYSTEM)
    system_tokens = _num_tokens(tokenizer, system)
    texts = list(map(_text_of, messages))
    place = max(range(len(texts)), key=lambda i: len(texts[i]))
    longest = LongestMessage(
        place=place + 1,
        num_messages=len(texts),
        role=messages[place].role,
        num_tokens=_num_tokens(tokenizer, texts[place]),
    )
    others = None
    if num_prompt_tokens is not None:
        tool_tokens = min(tool_tokens, num_prompt_tokens)
        others = max(num_prompt_tokens - tool_tokens - system_tokens, 0)
    return PromptParts(
        num_tools=len(job.tools),
        tool_tokens=tool_tokens,
        system_tokens=system_tokens,
        other_tokens=others,
        longest=longest,
    )


def _tool_tokens(tokenizer: Tokenizer, job: Job) -> int:
    """Return how many tokens the tools add to a conversation with one-letter messages."""
    has_system = job.messages is not None and job.messages[0].role == _SYSTEM
    roles = (_SYSTEM, "user") if has_system else ("user",)
    messages = [ChatMessage(role, _PLACEHOLDER) for role in roles]
    try:
        texts = [
            tokenizer.render_chat(messages, tools, arguments=job.chat_template_kwargs)
            for tools in (job.tools, ())
        ]
    except ParameterError:
        return 0  # the template refuses so short a conversation
    told, plain = (_num_tokens(tokenizer, text) for text in texts)
    return max(told - plain, 0)


def _text_of(message: ChatMessage) -> str:
    calls = "".join(call.arguments for call in message.tool_calls)
    return f"{message.reasoning}{message.content}{calls}"


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    counted = text[:COUNTED_CHARACTERS]
    num_tokens = len(tokenizer.encode_content(counted))
    return math.ceil(num_tokens * len(text) / len(counted)) if text else 0
