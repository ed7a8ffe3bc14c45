"""Token ids of long texts, computed piece by piece with bounded memory and length."""

from __future__ import annotations

from collections.abc import Callable

import tokenizers

from millrace.registry.tokenizers.text_rules import TextRules
from millrace.schemas.errors import ParameterError

# Characters of a piece. They bound the backend's memory: about 130 bytes for each character.
PIECE_CHARACTERS = 16_384
# A text of up to this length is counted to its end, even if it certainly does not fit. Its error
# then has the exact number, which clients use to shorten it.
COUNTED_CHARACTERS = 262_144


class TextTooLongError(Exception):
    """Text with too many tokens: ``num_tokens``, or more if not ``is_exact``."""

    def __init__(self, num_tokens: int, *, is_exact: bool) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.is_exact = is_exact


def ids_of(
    backend: tokenizers.Tokenizer, text: str | tuple[str, str], add_special_tokens: bool
) -> list[int]:
    """Return the token ids of a text or a pair of texts. Raises ParameterError("prompt") for
    invalid Unicode.
    """
    try:
        # Unlike ``encode`` it lets other threads run, and it computes no offsets.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise ParameterError("prompt", "the prompt is not valid Unicode text") from error
    ids: list[int] = encoding.ids
    return ids


def check_length(text: str, rules: TextRules, max_tokens: int | None) -> None:
    """Raise TextTooLongError for a text that certainly has more than ``max_tokens`` and is too long
    to be counted.
    """
    if max_tokens is None or len(text) <= COUNTED_CHARACTERS:
        return
    least_tokens = rules.least_tokens(text)
    if least_tokens > max_tokens:
        raise TextTooLongError(least_tokens, is_exact=False)


def ids_in_pieces(
    text: str,
    rules: TextRules,
    encode: Callable[[str], list[int]],
    max_tokens: int | None,
    around: tuple[list[int], list[int]] = ([], []),
) -> list[int]:
    """Return the token ids of a text, encoded in pieces where ``rules`` allow cuts.

    Args:
        rules: the rules for cutting it.
        encode: returns the ids of a piece.
        max_tokens: the maximum number of tokens; None: no limit.
        around: ids before and after the text.

    Raises:
        TextTooLongError: there are more than ``max_tokens``. For a text of more than
            ``COUNTED_CHARACTERS`` it is raised as soon as that is certain.
    """
    before, after = around
    ids = list(before)
    num_characters = 0
    stops_early = len(text) > COUNTED_CHARACTERS
    for piece in rules.pieces(text, PIECE_CHARACTERS):
        ids += encode(piece)
        num_characters += len(piece)
        num_tokens = len(ids) + len(after)
        is_whole = num_characters == len(text)
        if max_tokens is not None and num_tokens > max_tokens and (stops_early or is_whole):
            raise TextTooLongError(num_tokens, is_exact=is_whole)
    return ids + after
