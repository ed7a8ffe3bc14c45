"""Texts that are cut at their end to a number of tokens."""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum, auto

from millrace.gateway.models import TokenizerLike
from millrace.schemas.embeddings import Truncate
from millrace.schemas.errors import ParameterError


class Overflow(Enum):
    """How an input that is longer than the model's context window is treated."""

    REFUSED = auto()
    CUT = auto()  # at its end, as its client asks
    CUT_WITH_NOTICE = auto()


def truncation(truncate: Truncate | None, num_kept: int | None) -> tuple[Overflow, int | None]:
    """Return how longer inputs are treated, and ``truncate_prompt_tokens`` for their jobs. Raises
    ParameterError if two fields contradict each other."""
    if truncate in (None, False, "NONE"):
        return Overflow.REFUSED, num_kept
    if num_kept is not None:
        raise ParameterError("truncate", "Give one of truncate and truncate_prompt_tokens.")
    if truncate == "START":
        return Overflow.REFUSED, -1
    return Overflow.CUT, None


def first_tokens(tokenizer: TokenizerLike, text: str, num_tokens: int) -> str:
    """The beginning of ``text`` that has at most ``num_tokens`` tokens."""
    token_ids = tokenizer.encode(text, False)
    if len(token_ids) <= num_tokens:
        return text
    kept = b"".join(map(tokenizer.token_bytes, token_ids[:num_tokens])).decode(errors="ignore")
    # Some tokenizers put a space before a text.
    for cut in (kept, kept.removeprefix(" ")):
        if cut and text.startswith(cut) and len(tokenizer.encode(cut, False)) <= num_tokens:
            return cut

    def length(end: int) -> int:
        return len(tokenizer.encode(text[:end], False))

    # Others change the text, so that their tokens do not say where it ends.
    return text[: bisect_right(range(len(text)), num_tokens, key=length) - 1]
