"""Texts that a completion must not contain, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import lru_cache

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import ParameterError

_CACHED_LISTS = 128


class BadWords:
    """Token sequences whose last token is forbidden once the tokens before it were just generated.

    ``always`` are the tokens of sequences of one. Immutable, so that requests share it.
    """

    __slots__ = ("_by_last", "always")

    def __init__(self, sequences: Rows[tuple[int, ...]]) -> None:
        self.always = tuple(sorted({tokens[0] for tokens in sequences if len(tokens) == 1}))
        self._by_last: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for tokens in sequences:
            if len(tokens) > 1:
                self._by_last.setdefault(tokens[-2], []).append((tokens[:-1], tokens[-1]))

    def completing(self, token_ids: Rows[int], num_output_tokens: int) -> list[int]:
        """Return the tokens that would complete a sequence of several tokens.

        All of that sequence must be in the completion, the last ``num_output_tokens`` of
        ``token_ids``.
        """
        if not num_output_tokens:
            return []
        return [
            token
            for prefix, token in self._by_last.get(token_ids[-1], ())
            if len(prefix) <= num_output_tokens and tuple(token_ids[-len(prefix) :]) == prefix
        ]


def bad_words_reader(
    tokenizer: Callable[[], Tokenizer | None], vocab_size: int
) -> Callable[[tuple[str, ...]], BadWords]:
    """Return a function that converts bad words to token sequences. It caches recent lists.

    Each word has two spellings: at the beginning of a text, and after a space. The function raises
    ParameterError if the model has no tokenizer, or no tokens for a word.
    """

    def read(texts: tuple[str, ...]) -> BadWords:
        encoder = tokenizer()
        if encoder is None:
            raise ParameterError(
                "bad_words",
                "bad_words need a tokenizer, and this checkpoint has no tokenizer.json.",
            )
        sequences: dict[tuple[int, ...], None] = {}
        for text in texts:
            for spelling in (text.lstrip(), " " + text.lstrip()):
                tokens = _tokens(encoder, spelling)
                if not tokens or max(tokens) >= vocab_size:
                    raise ParameterError("bad_words", "a bad word has no tokens in this model")
                sequences[tokens] = None
        return BadWords(list(sequences))

    return lru_cache(_CACHED_LISTS)(read)


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except ParameterError as error:
        raise ParameterError("bad_words", "bad_words must be valid Unicode text") from error
