"""Output text of a sequence, cut at the first stop string or after the only tool call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from millrace.registry.tokenizers.detokenizer import IncrementalDetokenizer
from millrace.registry.tool_formats.first_call import FirstCall
from millrace.schemas.sampling import SamplingOptions


def silent_tokens(eos_token_ids: Iterable[int], sampling: SamplingOptions) -> frozenset[int]:
    """Return the tokens that would end the completion, unless the options include them in its
    text.
    """
    if sampling.include_stop_str_in_output:
        return frozenset()
    if sampling.ignore_eos and not sampling.skip_special_tokens:
        return frozenset(sampling.stop_token_ids)
    return frozenset(eos_token_ids).union(sampling.stop_token_ids)


if TYPE_CHECKING:
    from millrace.registry.tokenizers.tokenizer import Tokenizer
    from millrace.schemas.sampling import SamplingOptions


class TextPiece(NamedTuple):
    """Text that one token adds; ``stopped``: it completed a stop string or the only allowed call,
    so nothing follows.
    """

    text: str
    stopped: bool


_STOPPED = TextPiece("", True)


class TextStream:
    """Text of one sequence, token by token.

    Text that may be the beginning of a stop string is held back until the next tokens decide. The
    stop string that is complete first ends the text (of two that end together, the longer one) and
    is not part of it. With ``one_call`` the text ends after its first tool call, if no stop string
    ends it earlier. End-of-sequence and stop tokens add no text. ``include_stop_str_in_output``
    includes both in the text; without ``skip_special_tokens`` special tokens are included.

    The text of a token depends only on the tokens before it, never on how they were grouped. So a
    stream primed with the first n tokens continues exactly where another stopped.
    """

    __slots__ = (
        "_beginnings",
        "_detokenizer",
        "_first_call",
        "_held",
        "_includes_stop",
        "_longest_stop",
        "_silent",
        "_stops",
        "stop_string",
        "stopped",
    )

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingOptions, prompt_token_ids: Sequence[int]
    ) -> None:
        skips = sampling.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skips
        )
        self._includes_stop = sampling.include_stop_str_in_output
        self._silent = silent_tokens(tokenizer.eos_token_ids, sampling)
        self._stops = sampling.stop
        self._beginnings = frozenset(stop[0] for stop in sampling.stop)
        self._longest_stop = max(map(len, sampling.stop), default=0)
        self._first_call = None if sampling.one_call is None else FirstCall(sampling)
        self._held = ""
        self.stop_string: str | None = None
        self.stopped = False

    def push(self, token_id: int) -> TextPiece:
        """Return the text that ``token_id`` makes certain."""
        if self.stopped:
            return _STOPPED
        if token_id in self._silent:
            return TextPiece("", False)
        text = self._detokenizer.push(token_id)
        if self._first_call is not None and text:
            return self._up_to_first_call(self._first_call, text)
        return self._sift(text) if self._stops and text else TextPiece(text, False)

    def prime(self, token_ids: Iterable[int]) -> list[str]:
        """Add tokens that the reader already has, and return the text of each."""
        return [self.push(token_id).text for token_id in token_ids]

    def flush(self) -> str:
        """Return the text that was held back; call it once, after the last token."""
        if self.stopped:
            return ""
        rest = self._detokenizer.flush()
        if not self._stops:
            return rest
        text = self._sift(rest).text + self._held
        self._held = ""
        return text

    def _up_to_first_call(self, first_call: FirstCall, text: str) -> TextPiece:
        end = first_call.num_characters(text)
        piece = self._sift(text[:end]) if self._stops else TextPiece(text[:end], False)
        if end is None or piece.stopped:
            return piece
        self.stopped = True
        return TextPiece(piece.text + self._held, True)

    def _sift(self, text: str) -> TextPiece:
        """Return the held text and ``text``, up to a stop string or the beginning of one."""
        if not self._held and self._beginnings.isdisjoint(text):
            return TextPiece(text, False)
        text = self._held + text
        end, start = min(
            ((found + len(stop), found) for stop in self._stops if (found := text.find(stop)) >= 0),
            default=(-1, -1),
        )
        if end >= 0:
            self.stop_string = text[start:end]
            self.stopped = True
            self._held = ""
            return TextPiece(text[: end if self._includes_stop else start], True)
        num_held = self._num_held(text)
        certain = len(text) - num_held
        self._held = text[certain:]
        return TextPiece(text[:certain], False)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
