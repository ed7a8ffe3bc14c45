"""Token ids of a text that comes bit by bit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError

# Where a tokenizer's own rules are not known.
_WORD_END = re.compile(r"\S(?=\s)")
# What comes next may join the last words: an apostrophe and letters, or blanks around a line's end.
_NUM_OPEN_WORDS = 3
# Nobody is to wait for the end of a longer word.
MAX_HELD_CHARACTERS = 16


class UnspelledTextError(MillraceError, code="text_not_spelled", http_status=502):
    """The tokenizer has no tokens for a text."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"The engine's server wrote {text!r:.100}, for which the tokenizer of the catalogue's "
            "model has no tokens. Give the tokenizer of the server's model, or use an engine that "
            "returns token ids (vllm, sglang, llamacpp)."
        )


class IncrementalTokenizer:
    """The token ids of a text as it comes, behind ``token_ids``.

    Whatever ``push`` and the final ``flush`` returned, joined, is decoded to exactly the text that
    they were given, and no id that was returned changes by what comes later. Where the tokenizer's
    rules are known, they are the ids of the whole text, unless it cannot be cut for more than
    ``MAX_HELD_CHARACTERS`` (long words, and blanks in a row), or spells a token that was added to
    the vocabulary. None of them is a special token or ends a sequence,
    though the text may spell one.
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
        """The ids that ``text`` makes certain; often there are none. Raises UnspelledTextError for
        a text that the tokenizer has no tokens for."""
        self._held += text
        end = self._num_certain()
        certain, self._held = self._held[:end], self._held[end:]
        return self._encode(certain)

    def flush(self) -> list[int]:
        """Those of the rest; nothing follows. Raises UnspelledTextError."""
        rest, self._held = self._held, ""
        return self._encode(rest)

    def _num_certain(self) -> int:
        held = self._held
        cut = self._tokenizer.rules.cut or _WORD_END
        end = max((found.end() for found in cut.finditer(held)), default=0)
        words = self._tokenizer.word_ends(held)[:-_NUM_OPEN_WORDS]
        # Blanks at the end of a text are one word, those before a word are often two.
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
        """Whether they are tokens of a text, and of this one."""
        tokenizer = self._tokenizer
        if not tokenizer.silent_token_ids.isdisjoint(ids):
            return False
        pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        if self._is_first and ids:
            pieces[0] = tokenizer.first_token_bytes(ids[0])
        return b"".join(pieces) == spelled

    def _spell(self, spelled: bytes) -> Iterator[int]:
        """From the left, the longest token that fits each time."""
        ids, longest = self._tokenizer.ids_by_bytes, self._tokenizer.longest_token_bytes
        if self._is_first:
            # This one is lost.
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
    """What may be encoded in place of ``text``: many tokenizers put a space before each text."""
    yield text
    if text.startswith(" "):
        yield text[1:]
    yield f" {text}"
