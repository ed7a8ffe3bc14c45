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
    """One entry for each token."""
    return tuple(_info(tokenizer, one) for one in logprobs)


def token_text(tokenizer: TokenizerLike, token_id: int) -> str:
    """Return the text of a token. A token that is not whole characters shows as OpenAI's servers
    write it: ``bytes:`` and its bytes with escapes, such as ``bytes:\\xf0\\x9f``, so that tokens of
    different bytes have different texts."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"bytes:{repr(raw)[2:-1]}"


def _alternatives(one: TokenLogprob) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens, and last the chosen token if it is not among them: a grammar, a
    bias or chance may have chosen it. Empty if no alternatives were asked for."""
    if not one.top or any(token_id == one.token_id for token_id, _ in one.top):
        return one.top
    return (*one.top, (one.token_id, one.logprob))


def _info(tokenizer: TokenizerLike, one: TokenLogprob) -> LogprobInfo:
    return LogprobInfo(
        token=token_text(tokenizer, one.token_id),
        logprob=one.logprob,
        bytes=tuple(tokenizer.token_bytes(one.token_id)),
        top_logprobs=tuple(
            TopLogprob(
                token=token_text(tokenizer, token_id),
                logprob=logprob,
                bytes=tuple(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob in _alternatives(one)
        ),
    )


def completion_logprobs(
    tokenizer: TokenizerLike,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
) -> CompletionLogprobs:
    """The four lists of ``/v1/completions``. An entry is None for a token that nothing goes before;
    ``offsets`` are where the tokens begin in the choice's text, in characters."""
    return CompletionLogprobs(
        tokens=tuple(token_text(tokenizer, token_id) for token_id in token_ids),
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
            decoded_token=token_text(tokenizer, token_id),
        )
        for token_id, (logprob, rank) in (
            {one.token_id: (one.logprob, one.rank or place)} | ranked
        ).items()
    }


def _top(tokenizer: TokenizerLike, one: TokenLogprob) -> dict[str, float]:
    """Return log-probabilities of the alternatives and of the chosen token by their texts. The
    chosen token is always among them. Of two tokens with one text, the likelier counts."""
    found: dict[str, float] = {}
    for token_id, logprob in _alternatives(one) or ((one.token_id, one.logprob),):
        text = token_text(tokenizer, token_id)
        found[text] = max(logprob, found.get(text, logprob))
    return found
