"""Prompts for servers that take them as text only."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.types import EngineRequest
from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import ParameterError


def prompt_text(tokenizer: Tokenizer, request: EngineRequest, token_ids: Sequence[int]) -> str:
    """The text of a prompt and of what was made behind it, special tokens spelled out, less those
    that a server puts before each prompt itself. Raises ParameterError for a prompt that is no
    text."""
    prompt = _less_begin(tokenizer, request.prompt_token_ids)
    spelled = b"".join(map(tokenizer.token_bytes, prompt))
    try:
        spelled.decode()
    except UnicodeDecodeError:
        raise ParameterError(
            "prompt_token_ids",
            "prompt_token_ids begins or ends within a character; the engine of this model takes "
            "prompts as text.",
        ) from None
    return tokenizer.decode((*prompt, *token_ids), skip_special_tokens=False)


def num_whole(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> int:
    """How many of ``token_ids`` there are up to the last one that does not end within a
    character."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=False)
    num = 0
    for index, token_id in enumerate(token_ids, 1):
        detokenizer.push(token_id)
        if not detokenizer.is_within_character:
            num = index
    return num


def _less_begin(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    before = (tokenizer.special_around or ([], []))[0]
    num = len(before)
    return token_ids[num:] if list(token_ids[:num]) == before else token_ids
