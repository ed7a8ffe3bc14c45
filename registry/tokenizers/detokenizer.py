"""Incremental detokenizer: text from tokens, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from millrace.registry.tokenizers.token_bytes import TokenBytes

# The longest prefix of an unfinished character.
_LONGEST_PREFIX_BYTES = 3


class HasTokenBytes(Protocol):
    """Tokenizer as the detokenizer needs it."""

    @property
    def table(self) -> TokenBytes: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...


class IncrementalDetokenizer:
    """Text of a sequence, token by token.

    The texts of all ``push`` calls and the final ``flush``, joined, are exactly the tokenizer's
    text of the whole sequence minus that of the prompt. A character is returned when its last byte
    arrives, never in halves. Bytes that can no longer become a character turn into U+FFFD as soon
    as that is certain. If the prompt ends within a character, that character belongs to the new
    text. Special tokens and ids beyond the vocabulary add nothing.

    A push has constant cost: each token has its own bytes, and only the bytes of an unfinished
    character are kept.
    """

    __slots__ = ("_decoder", "_first_pieces", "_pieces", "_skipped", "_unfinished")

    def __init__(
        self,
        tokenizer: HasTokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        table = tokenizer.table
        self._pieces = table.pieces
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._first_pieces = table.first_pieces
        self._unfinished = False
        self._read_prompt(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` makes certain; often empty or several characters."""
        if token_id in self._skipped or not 0 <= token_id < len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if self._first_pieces is not None and piece:
            piece = self._first_pieces[token_id]
            self._first_pieces = None
        if isinstance(piece, str):
            if not self._unfinished:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._unfinished = bool(self._decoder.getstate()[0])
        return text

    @property
    def is_within_character(self) -> bool:
        """True if the last token left a character unfinished."""
        return self._unfinished

    def flush(self) -> str:
        """Return the remaining text after the last token: U+FFFD for an unfinished character."""
        self._unfinished = False
        return self._decoder.decode(b"", final=True)

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Continue where the prompt stops: within a character, or before the first word."""
        tail: list[int] = []
        num_tail_bytes = 0
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skipped or not 0 <= token_id < len(self._pieces):
                continue
            tail.append(token_id)
            piece = self._pieces[token_id]
            num_tail_bytes += len(piece)
            if (piece and isinstance(piece, str)) or num_tail_bytes >= _LONGEST_PREFIX_BYTES:
                break
        for token_id in reversed(tail):
            self.push(token_id)
