"""Error messages for a prompt that exceeds a context window, in the words that clients recognise.

Clients match these words to shorten a conversation, so they are the words of OpenAI's and
Anthropic's own servers. Numbers have no thousands separators: clients parse them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

_OPENAI = re.compile(
    r"This model's maximum context length is (?P<window>\d{1,19}) tokens\. However, (?:"
    r"you requested (?P<total>\d{1,19}) tokens \([^)]*?"
    r"\b(?P<completion>\d{1,19}) in the completion\)"
    r"|your \w+ resulted in (?P<prompt>\d{1,19}) tokens[^.]*)\. "
    r"Please reduce the length of the [^.]*\."
)


class LongestMessage(NamedTuple):
    """Message with the most text: its place in the conversation, counted from 1."""

    place: int
    num_messages: int
    role: str
    num_tokens: int


class PromptParts(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of the parts of a prompt made of messages. ``other_tokens`` counts all messages
    but the system message; None: the prompt was not counted to its end."""

    num_tools: int
    tool_tokens: int
    system_tokens: int
    other_tokens: int | None
    longest: LongestMessage

    def __str__(self) -> str:
        tools = "1 tool takes" if self.num_tools == 1 else f"{self.num_tools} tools take"
        shares = [f"{tools} {_tokens(self.tool_tokens)}"] if self.num_tools else []
        if self.system_tokens:
            shares.append(f"system messages {_tokens(self.system_tokens)}")
        if self.other_tokens is not None:
            shares.append(f"other messages {_tokens(self.other_tokens)}")
        longest = self.longest
        where = f"message {longest.place} of {longest.num_messages} (role {longest.role})"
        shares.append(f"the longest message, {where}, {_tokens(longest.num_tokens)}")
        return f"In the prompt: {', '.join(shares)}."


def too_long(
    num_prompt_tokens: int,
    max_tokens: int | None,
    window_tokens: int,
    *,
    noun: str,
    is_exact: bool,
    parts: PromptParts | None,
) -> str:
    """Return OpenAI's sentences, followed by the token counts of the prompt's parts.

    Args:
        noun: The name of the prompt's contents in the message.
        max_tokens: The requested length of the completion; None: not given.
    """
    num_functions = parts.tool_tokens if parts is not None and is_exact else 0
    own = f"{num_prompt_tokens - num_functions} in the {noun}"
    shares = [own if is_exact else f"at least {own}"]
    if num_functions:
        shares.append(f"{num_functions} in the functions")
    if max_tokens is None and num_prompt_tokens <= window_tokens:
        max_tokens = 1  # no completion is shorter
    if max_tokens is not None:
        shares.append(f"{max_tokens} in the completion")
        asked = f"you requested {num_prompt_tokens + max_tokens} tokens ({_listed(shares, 'and')})"
    else:
        asked = f"your {noun} resulted in {num_prompt_tokens} tokens"
        if num_functions:
            asked += f" ({_listed(shares, 'and')})"
        elif not is_exact:
            asked += " or more"
    shorter = [noun]
    if num_functions:
        shorter.append("functions")
    if max_tokens is not None:
        shorter.append("completion")
    sentences = (
        f"This model's maximum context length is {window_tokens} tokens. However, {asked}. "
        f"Please reduce the length of the {_listed(shorter, 'or')}."
    )
    return sentences if parts is None else f"{sentences} {parts}"


def in_anthropic_words(message: str) -> str:
    """Return ``message`` with OpenAI's sentences of ``too_long`` replaced by Anthropic's.

    The rest of the message stays. A message without these sentences is returned unchanged.
    """
    found = _OPENAI.match(message)
    if found is None:
        return message
    window_tokens = int(found["window"])
    completion = found["completion"]
    if completion is None:
        num_prompt_tokens = int(found["prompt"])
    else:
        num_prompt_tokens = int(found["total"]) - int(completion)
    if completion is not None and num_prompt_tokens < window_tokens:
        said = (
            f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + "
            f"{completion} > {window_tokens}, decrease input length or `max_tokens` and try again"
        )
    else:
        longest = min(window_tokens, num_prompt_tokens - 1)  # a completion needs a token
        said = f"prompt is too long: {num_prompt_tokens} tokens > {longest} maximum"
    rest = message[found.end() :]
    return f"{said}.{rest}" if rest else said


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _listed(names: list[str], joint: str) -> str:
    """Return ``a``, ``a or b``, ``a, b, or c``; join two shares of tokens by a comma alone."""
    if len(names) > 2:
        return f"{', '.join(names[:-1])}, {joint} {names[-1]}"
    return (", " if joint == "and" else " or ").join(names)
