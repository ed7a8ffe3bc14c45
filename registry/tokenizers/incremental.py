"""Incremental tokenizer: token ids of a text that arrives piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError

# Used where a tokenizer's own rules are unknown.
_WORD_END = re.compile(r"\S(?=\s)")
# Words that later text may still join: an apostrophe and letters, or blanks around a line's end.
_NUM_OPEN_WORDS = 3
# Limit on held text; a longer word is not waited for.
MAX_HELD_CHARACTERS = 16


class UnspelledTextError(MillraceError, code="text_not_spelled", http_status=502):
    """Text for which the tokenizer has no tokens."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"The engine's server wrote {text!r:.100}, for which the tokenizer of the catalogue's "
            "model has no tokens. Give the tokenizer of the server's model, or use an engine that "
            "returns token ids (vllm, sglang, llamacpp)."
        )


class IncrementalTokenizer:
    """Token ids of a text as it arrives, following ``token_ids``.

    The ids of all ``push`` calls and the final ``flush``, joined, decode to exactly the given text.
    Later text never changes returned ids. If the tokenizer's rules are known, they are the ids of
    the whole text. Exceptions are texts that cannot be cut for more than ``MAX_HELD_CHARACTERS``
    (long words, and blanks in a row), and texts that spell a token added to the vocabulary. None of
    the ids is a special token or ends a sequence, even if the text spells one.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._held = ""
        # The first word of a text may lose the space before it.
        self._is_first = tokenizer.table.first_pieces is not None and not any(
            token_id not in tokenizer.special_token_ids and tokenizer.token_bytes(token_id)
            for token_id in token_ids
        )

    def push(self, text: str) -> list[int]:
        """Return the ids that ``text`` makes certain, often none. Raises UnspelledTextError if the
        tokenizer has no tokens for the text.
        """
        self._held += text
        end = self._num_certain()
        certain, self._held = self._held[:end], self._held[end:]
        return self._encode(certain)

    def flush(self) -> list[int]:
        """Return the ids of the rest; nothing follows. Raises UnspelledTextError."""
        rest, self._held = self._held, ""
        return self._encode(rest)

    def _num_certain(self) -> int:
        held = self._held
        cut = self._tokenizer.rules.cut or _WORD_END
        end = max((found.end() for found in cut.finditer(held)), default=0)
        words = self._tokenizer.word_ends(held)[:-_NUM_OPEN_WORDS]
        # Blanks at the end of a text are one word; blanks before a word are often two.
        ends = (word for word in reversed(words) if not held[word - 1].isspace())
        end = max(end, next(ends, 0))
        return end if len(held) - end <= MAX_HELD_CHARACTERS else len(held)

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        spelled = text.encode()
        for candidate in _candidates(text):
            ids = self._tokenizer.encode(candidate, add_special_tokens=False)
            if self._is_decoded_to(ids, spelled):
                break
        else:
            ids = list(self._spell(spelled))
        self._is_first = False
        return ids

    def _is_decoded_to(self, ids: Sequence[int], spelled: bytes) -> bool:
        """Return whether the ids are ordinary tokens that decode to this text."""
        tokenizer = self._tokenizer
        if not tokenizer.silent_token_ids.isdisjoint(ids):
            return False
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        if self._is_first and ids:
            pieces[0] = tokenizer.first_token_bytes(ids[0])
        return b"".join(pieces) == spelled

    def _spell(self, spelled: bytes) -> Iterator[int]:
        """Yield the longest fitting token each time, from the left."""
        ids, longest = self._tokenizer.ids_by_bytes, self._tokenizer.longest_token_bytes
        if self._is_first:
            # Decoding removes this space.
            spelled = b" " + spelled
        at = 0
        while at < len(spelled):
            end = min(at + longest, len(spelled))
            while spelled[at:end] not in ids:
                end -= 1
                if end <= at:
                    raise UnspelledTextError(spelled.decode())
            yield ids[spelled[at:end]]
            at = end


def _candidates(text: str) -> Iterator[str]:
    """Yield alternatives to encode for ``text``: many tokenizers put a space before each text."""
    yield text
    if text.startswith(" "):
        yield text[1:]
    yield f" {text}"
