"""Where the tokens of a text choice begin in its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.gateway.models import TokenizerLike
from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer

# Enough of a prompt to know how the next word begins.
_PROMPT_TAIL_CHARACTERS = 8


class TextOffsets:
    """Counts the characters of a text, token by token, from ``start`` on.

    All tokens of one character begin where the character does. Tokens without text (special tokens
    and tokens in ``silent``) begin where the next text does.
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
        """Return where the token begins, in characters."""
        detokenizer = self._detokenizer
        if token_id in self._silent:
            return self._length
        if detokenizer.is_within_character and not _continues(self._tokenizer, token_id):
            # Bytes that no later one completes show before this token.
            self._length += len(detokenizer.flush())
        offset = self._length
        self._length += len(detokenizer.push(token_id))
        return offset

    def push_all(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return where each token begins."""
        return tuple(map(self.push, token_ids))


def _continues(tokenizer: TokenizerLike, token_id: int) -> bool:
    """Whether a token may go on with a character; one without bytes leaves it as it is."""
    raw = tokenizer.token_bytes(token_id)
    return not raw or token_id in tokenizer.special_token_ids or 0x80 <= raw[0] < 0xC0
