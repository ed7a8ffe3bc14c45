"""Messages for a prompt that is too long, as clients' regular expressions parse them."""

from __future__ import annotations

import re
import time

import pytest

from millrace.schemas.context_length import (
    LongestMessage,
    PromptParts,
    in_anthropic_words,
    too_long,
)
from millrace.schemas.errors import ContextLengthError

_PARTS = PromptParts(
    num_tools=36,
    tool_tokens=6_472,
    system_tokens=120,
    other_tokens=408,
    longest=LongestMessage(place=5, num_messages=9, role="tool", num_tokens=250),
)
_TOLD = (
    "In the prompt: 36 tools take 6472 tokens, system messages 120 tokens, other messages 408 "
    "tokens, the longest message, message 5 of 9 (role tool), 250 tokens."
)
# How clients tell such an error from others: opencode, pi, Cline, LiteLLM, Letta and others.
_CLIENTS = [
    r"maximum context length is \d+ tokens",
    r"maximum context length is (\d+) tokens.*?(?:requested|resulted in) (\d+) tokens",
    r"max.*?(\d+) tokens.*?(\d+) ",
    r"(?i)\bmaximum\s*context\b",
    r"This model's maximum context length is",
]
# Claude Code's own two expressions.
_LOWERS_MAX_TOKENS = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
_COMPACTS = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"

_SENTENCES = [
    (
        (900, 200, 1_000, "messages", True, None),
        (
            "However, you requested 1100 tokens (900 in the messages, 200 in the completion). "
            "Please reduce the length of the messages or completion."
        ),
        (
            "input length and `max_tokens` exceed context limit: 900 + 200 > 1000, decrease input "
            "length or `max_tokens` and try again"
        ),
    ),
    (
        (7_000, 200, 2_048, "messages", True, _PARTS),
        "However, you requested 7200 tokens (528 in the messages, 6472 in the functions, and 200 "
        "in the completion). Please reduce the length of the messages, functions, or completion. "
        + _TOLD,
        "prompt is too long: 7000 tokens > 2048 maximum. " + _TOLD,
    ),
    (
        (7_000, None, 2_048, "messages", True, _PARTS),
        "However, your messages resulted in 7000 tokens (528 in the messages, 6472 in the "
        "functions). Please reduce the length of the messages or functions. " + _TOLD,
        "prompt is too long: 7000 tokens > 2048 maximum. " + _TOLD,
    ),
    (
        (2_048, None, 2_048, "prompt", True, None),
        (
            "However, you requested 2049 tokens (2048 in the prompt, 1 in the completion). Please "
            "reduce the length of the prompt or completion."
        ),
        "prompt is too long: 2048 tokens > 2047 maximum",
    ),
    (
        (9_000, None, 2_048, "prompt", False, None),
        (
            "However, your prompt resulted in 9000 tokens or more. Please reduce the length of the "
            "prompt."
        ),
        "prompt is too long: 9000 tokens > 2048 maximum",
    ),
    (
        (9_000, 5, 2_048, "messages", False, None),
        (
            "However, you requested 9005 tokens (at least 9000 in the messages, 5 in the "
            "completion). Please reduce the length of the messages or completion."
        ),
        "prompt is too long: 9000 tokens > 2048 maximum",
    ),
]


@pytest.mark.parametrize(("given", "said", "in_their_words"), _SENTENCES)
def test_both_spellings(
    given: tuple[int, int | None, int, str, bool, PromptParts | None],
    said: str,
    in_their_words: str,
) -> None:
    num_prompt, max_tokens, window, noun, is_exact, parts = given
    message = too_long(num_prompt, max_tokens, window, noun=noun, is_exact=is_exact, parts=parts)
    assert message == f"This model's maximum context length is {window} tokens. {said}"
    assert in_anthropic_words(message) == in_their_words
    assert all(re.search(pattern, message) for pattern in _CLIENTS)
    compacts = re.search(_COMPACTS, in_their_words)
    lowers = re.search(_LOWERS_MAX_TOKENS, in_their_words)
    if lowers is not None:
        assert lowers.groups() == (str(num_prompt), str(max_tokens), str(window))
    else:
        assert compacts is not None
        assert int(compacts[1]) == num_prompt > int(compacts[2])


def test_whose_limit_it_is_stands_behind_it() -> None:
    error = ContextLengthError(9, 9, 10, field="messages", limit="Requests of b may hold 10.")
    assert error.message.endswith("or completion. Requests of b may hold 10.")
    assert in_anthropic_words(error.message).endswith("and try again. Requests of b may hold 10.")


def test_other_sentences_stay() -> None:
    assert in_anthropic_words("The KV cache is full.") == "The KV cache is full."


def test_one_tool_and_one_message() -> None:
    parts = PromptParts(
        num_tools=1,
        tool_tokens=9,
        system_tokens=0,
        other_tokens=None,
        longest=LongestMessage(place=1, num_messages=1, role="user", num_tokens=7),
    )
    assert str(parts) == (
        "In the prompt: 1 tool takes 9 tokens, the longest message, message 1 of 1 (role user), "
        "7 tokens."
    )


def test_a_long_message_of_a_server_is_read_in_time() -> None:
    begins = "This model's maximum context length is 5 tokens. However, you requested 5 tokens ("
    message = begins + "1" * 50_000
    started_s = time.process_time()
    assert in_anthropic_words(message) == message
    assert time.process_time() - started_s < 1.0
