"""Log-probabilities as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.gateway.models import TokenizerLike
from millrace.gateway.request.response_reader import ResponseReader
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.openai import (
    CompletionLogprobs,
    LogprobInfo,
    PromptTokenInfo,
    PromptTokens,
    TopLogprob,
)


def logprob_infos(
    tokenizer: TokenizerLike, logprobs: Sequence[TokenLogprob]
) -> tuple[LogprobInfo, ...]:
    """One entry for each token; bytes that are no whole character show as U+FFFD in its text."""
    return tuple(_info(tokenizer, one) for one in logprobs)


def _info(tokenizer: TokenizerLike, one: TokenLogprob) -> LogprobInfo:
    raw = tokenizer.token_bytes(one.token_id)
    return LogprobInfo(
        token=raw.decode(errors="replace"),
        logprob=one.logprob,
        bytes=tuple(raw),
        top_logprobs=tuple(
            TopLogprob(
                token=(alternative := tokenizer.token_bytes(token_id)).decode(errors="replace"),
                logprob=logprob,
                bytes=tuple(alternative),
            )
            for token_id, logprob in one.top
        ),
    )


def completion_logprobs(
    tokenizer: TokenizerLike,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    first_offset: int,
) -> CompletionLogprobs:
    """The four lists of ``/v1/completions``. An entry is None for a token that nothing goes before;
    ``first_offset`` is where the first token begins in the choice's text, in characters."""
    tokens = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tuple(tokens),
        token_logprobs=tuple(None if one is None else one.logprob for one in logprobs),
        top_logprobs=tuple(None if one is None else _top(tokenizer, one) for one in logprobs),
        text_offset=tuple(offsets),
    )


def prompt_tokens(response: ResponseReader, choice: int) -> PromptTokens | msgspec.UnsetType:
    """Those of the choice's prompt, if the request asked for them."""
    if not response.request.tells_prompt_logprobs:
        return msgspec.UNSET
    tokenizer = response.model.tokenizer
    return tuple(
        None if one is None else _by_id(tokenizer, one) for one in response.prompt_logprobs(choice)
    )


def _by_id(tokenizer: TokenizerLike, one: TokenLogprob) -> dict[int, PromptTokenInfo]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(one.top, 1)}
    _, place = ranked.pop(one.token_id, (one.logprob, None))
    return {
        token_id: PromptTokenInfo(
            logprob=logprob,
            rank=rank,
            decoded_token=tokenizer.token_bytes(token_id).decode(errors="replace"),
        )
        for token_id, (logprob, rank) in (
            {one.token_id: (one.logprob, one.rank or place)} | ranked
        ).items()
    }


def _top(tokenizer: TokenizerLike, one: TokenLogprob) -> dict[str, float]:
    """The chosen token and the alternatives by their texts; of two with one text the likelier."""
    found: dict[str, float] = {}
    for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        found[text] = max(logprob, found.get(text, logprob))
    return found
