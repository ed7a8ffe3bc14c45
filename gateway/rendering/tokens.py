"""Token details in answers: ids, log-probabilities, and text offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from millrace.bus.stored_results import UNKNOWN_TOKEN_ID
from millrace.gateway.models import TokenizerLike
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import AnswerText, Part, ReasoningPart
from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.openai import (
    CompletionLogprobs,
    LogprobInfo,
    PromptTokenInfo,
    PromptTokens,
    TokenIds,
    TopLogprob,
)

# Enough of a prompt to determine how the next word begins.
_PROMPT_TAIL_CHARACTERS = 8


class ToldTokens:
    """Token ids of one answer, collected as its parts come."""

    def __init__(self, response: ResponseReader) -> None:
        self._response = response
        self._token_ids: list[list[int]] = [[] for _ in response.choices]

    def add(self, part: Part) -> None:
        """Add the tokens of a part; call it right after the part was read."""
        if isinstance(part, AnswerText | ReasoningPart):
            self._token_ids[part.choice] += self._ids(part)

    def of_part(self, part: AnswerText | ReasoningPart) -> TokenIds:
        """Return the token ids of a part; call it right after the part was read."""
        return _known(self._ids(part))

    def of_choice(self, choice: int) -> TokenIds:
        """Return all added token ids of a choice."""
        return _known(self._token_ids[choice])

    def _ids(self, part: AnswerText | ReasoningPart) -> tuple[int, ...]:
        choice = self._response.choices[part.choice]
        return choice.token_ids(part.first_index, part.num_tokens)


def _known(token_ids: Iterable[int]) -> TokenIds:
    """Return the ids; None for a result that was too large to be stored with its ids."""
    ids = tuple(token_ids)
    return None if UNKNOWN_TOKEN_ID in ids else ids


class TextOffsets:
    """Offsets of tokens in a text, in characters from ``start`` on.

    All tokens of one character begin at the character. Tokens without text (special tokens and
    tokens in ``silent``) begin at the next text.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        prompt: str | Sequence[int] = "",
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        silent: frozenset[int] = frozenset(),
    ) -> None:
        if isinstance(prompt, str):
            tail = prompt[-_PROMPT_TAIL_CHARACTERS:]
            prompt = tokenizer.encode(tail, add_special_tokens=False) if tail else ()
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt, skip_special_tokens=skip_special_tokens
        )
        self._silent = silent
        self._length = start

    def push(self, token_id: int) -> int:
        """Return the offset of the token, in characters."""
        detokenizer = self._detokenizer
        if token_id in self._silent:
            return self._length
        if detokenizer.is_within_character and not _continues(self._tokenizer, token_id):
            # Bytes that no later token completes appear before this token.
            self._length += len(detokenizer.flush())
        offset = self._length
        self._length += len(detokenizer.push(token_id))
        return offset

    def push_all(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the offset of each token."""
        return tuple(map(self.push, token_ids))


def _continues(tokenizer: TokenizerLike, token_id: int) -> bool:
    """Return whether a token may continue a character. A token without bytes leaves the character
    unchanged.
    """
    raw = tokenizer.token_bytes(token_id)
    return not raw or token_id in tokenizer.special_token_ids or 0x80 <= raw[0] < 0xC0


def logprob_infos(
    tokenizer: TokenizerLike, logprobs: Sequence[TokenLogprob]
) -> tuple[LogprobInfo, ...]:
    """Return one entry for each token."""
    return tuple(_info(tokenizer, one) for one in logprobs)


def token_text(tokenizer: TokenizerLike, token_id: int) -> str:
    """Return the text of a token. A token of incomplete characters becomes ``bytes:`` and its bytes
    with escapes, such as ``bytes:\xf0\x9f``, as on OpenAI's servers, so that tokens of different
    bytes have different texts.
    """
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"bytes:{repr(raw)[2:-1]}"


def _alternatives(one: TokenLogprob) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens, and last the chosen token if it is not among them: a grammar, a
    bias or sampling may have chosen it. Empty if no alternatives were requested.
    """
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
    """Return the four lists of ``/v1/completions``. An entry is None for a token without a
    predecessor; ``offsets`` are the tokens' offsets in the choice's text, in characters.
    """
    return CompletionLogprobs(
        tokens=tuple(token_text(tokenizer, token_id) for token_id in token_ids),
        token_logprobs=tuple(None if one is None else one.logprob for one in logprobs),
        top_logprobs=tuple(None if one is None else _top(tokenizer, one) for one in logprobs),
        text_offset=tuple(offsets),
    )


def prompt_tokens(response: ResponseReader, choice: int) -> PromptTokens | msgspec.UnsetType:
    """Return the log-probabilities of the choice's prompt tokens, if the request asked for them."""
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
    """Return the log-probabilities of the alternatives and of the chosen token by their texts. The
    chosen token is always among them. Of two tokens with one text, the likelier counts.
    """
    found: dict[str, float] = {}
    for token_id, logprob in _alternatives(one) or ((one.token_id, one.logprob),):
        text = token_text(tokenizer, token_id)
        found[text] = max(logprob, found.get(text, logprob))
    return found
