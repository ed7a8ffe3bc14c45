"""Matcher of a completion that begins with reasoning, which is free text, before its grammar
applies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Rows
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from millrace.engine.grammar.library import GrammarLibrary, Matcher
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import SamplingParams

_BLANKS = b" \t\n\r"
_GAPS = ("\n\n", "\n")


class ReasoningTokens:
    """Marks of reasoning, in the tokens of one model.

    ``start_id`` is the token that starts reasoning. It is None if the mark has several tokens; then
    there is no reasoning before a grammar, since the mark could not be told from the grammar's
    text. ``closing_ids`` end reasoning, and ``gap_ids`` may come before the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat,
        num_words: int,
        eos_token_ids: Rows[int],
    ) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        self.start, self.end = reasoning.start.encode(), reasoning.end.encode()
        self.is_open = reasoning.is_open
        starts = encode(reasoning.start)
        self.start_id = starts[0] if len(starts) == 1 else None
        self.closing_ids = encode(f"\n{reasoning.end}\n\n")
        gaps = map(encode, _GAPS)
        self.gap_ids = tuple(ids[0] for ids in gaps if len(ids) == 1)
        self.bytes_of = tokenizer.token_bytes
        self.any_token = np.full(num_words, -1, dtype=np.int32)
        self.going_on = self.any_token.copy()
        for token_id in eos_token_ids:
            self.going_on[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))


class _At(Enum):
    BEFORE = auto()  # it is not known yet whether there is reasoning
    WITHIN = auto()
    CLOSING = auto()  # reasoning has used up its budget
    BEHIND = auto()  # a gap may come
    ANSWER = auto()


class ReasoningMatcher:
    """Matcher of at most ``budget`` tokens of reasoning, then the grammar of ``inner``.

    ``budget`` None: no limit. ``inner`` None: no grammar. The interface is that of ``Matcher``.
    """

    __slots__ = (
        "_at",
        "_budget",
        "_failure",
        "_inner",
        "_num_closing",
        "_num_thoughts",
        "_text",
        "_tokens",
        "must_end",
    )

    def __init__(self, tokens: ReasoningTokens, inner: Matcher | None, budget: int | None) -> None:
        self._tokens = tokens
        self._inner = inner
        self._budget = budget
        self._at = _At.BEFORE
        self._text = b""
        self._num_thoughts = self._num_closing = 0
        self._failure = ""
        self.must_end = False
        if tokens.is_open:
            self._enter_thoughts()

    def copy(self) -> ReasoningMatcher:
        """Copy the matcher; the copy advances by itself."""
        inner = None if self._inner is None else self._inner.copy()
        other = ReasoningMatcher(self._tokens, inner, self._budget)
        for name in ("_at", "_text", "_num_thoughts", "_num_closing", "_failure"):
            setattr(other, name, getattr(self, name))
        return other

    @property
    def complete(self) -> bool:
        """True if nothing can follow."""
        return self._at is _At.ANSWER and self._inner is not None and self._inner.complete

    @property
    def error(self) -> GrammarError | None:
        """Error if the completion cannot be followed any further; else None."""
        if self._failure:
            return GrammarError(self._failure)
        return None if self._inner is None else self._inner.error

    def fill_mask(self, address: int, num_words: int) -> None:
        """Set the bits of the token ids that may come next: ``num_words`` int32 at ``address``."""
        mask = np.ctypeslib.as_array((ctypes.c_int32 * num_words).from_address(address))
        tokens, inner = self._tokens, self._inner
        if self._at is _At.CLOSING:
            mask[:] = 0
            _allow(mask, tokens.closing_ids[self._num_closing])
        elif inner is None:
            mask[:] = tokens.any_token
        elif self._at is _At.WITHIN:
            # An end here would leave no answer.
            mask[:] = tokens.going_on
        else:
            inner.fill_mask(address, num_words)
            if self._at is _At.BEFORE and tokens.start_id is not None:
                _allow(mask, tokens.start_id)
            elif self._at is _At.BEHIND:
                for token_id in tokens.gap_ids:
                    _allow(mask, token_id)

    def num_fitting(self, token_ids: Rows[int]) -> int:
        """Return how many of the tokens may come next, one after the other.

        Only an answer's grammar forbids any.
        """
        if self._at is _At.ANSWER and self._inner is not None:
            return self._inner.num_fitting(token_ids)
        return len(token_ids)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, as far as there is no choice."""
        if self._at is _At.CLOSING:
            return self._tokens.closing_ids[self._num_closing :]
        if self._at is _At.ANSWER and self._inner is not None:
            return self._inner.forced_tokens()
        return []

    def accept(self, token_ids: Rows[int]) -> None:
        """Advance by tokens. Raises GrammarError, also for an earlier failure."""
        for number, token_id in enumerate(token_ids):
            if self._at is _At.ANSWER:
                self._answer(token_ids[number:])
                return
            self._step(token_id)
        error = self.error
        if error is not None:
            raise error

    def _step(self, token_id: int) -> None:
        match self._at:
            case _At.BEFORE:
                self._begin(token_id)
            case _At.BEHIND:
                self._at = _At.ANSWER
                if token_id not in self._tokens.gap_ids:
                    self._answer((token_id,))
            case _At.CLOSING if token_id == self._tokens.closing_ids[self._num_closing]:
                self._num_closing += 1
                if self._num_closing == len(self._tokens.closing_ids):
                    self._at = _At.ANSWER
            case _:
                self._think(token_id)

    def _begin(self, token_id: int) -> None:
        tokens = self._tokens
        if token_id == tokens.start_id:
            self._enter_thoughts()
            return
        if self._inner is None:
            self._text = (self._text + tokens.bytes_of(token_id)).lstrip(_BLANKS)
            if self._text.startswith(tokens.start):
                self._enter_thoughts()
            if self._at is not _At.BEFORE or tokens.start.startswith(self._text):
                return
        self._at = _At.ANSWER
        self._answer((token_id,))

    def _enter_thoughts(self) -> None:
        self._text = b""
        self._at = _At.CLOSING if self._budget == 0 else _At.WITHIN

    def _think(self, token_id: int) -> None:
        tokens = self._tokens
        self._num_thoughts += 1
        text = self._text + tokens.bytes_of(token_id)
        found = text.find(tokens.end)
        self._text = text[-len(tokens.end) :]
        if found >= 0:
            self._at = _At.BEHIND
            if self._inner is not None and text[found + len(tokens.end) :].strip(_BLANKS):
                self._failure = "The end of the thoughts and the answer are in one token."
        elif self._budget is not None and self._num_thoughts >= self._budget:
            self._at, self._num_closing = _At.CLOSING, 0

    def _answer(self, token_ids: Rows[int]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)


class ReasoningMatchers:
    """Factory of matchers with reasoning.

    ``library`` raises GrammarError if there are no grammars.
    """

    def __init__(self, library: Callable[[], GrammarLibrary]) -> None:
        self._library = library
        self._tokens: dict[ReasoningFormat, ReasoningTokens] = {}

    def __call__(self, inner: Matcher | None, sampling: SamplingParams) -> ReasoningMatcher:
        """Make a matcher of reasoning, then ``inner``; None: any answer. Raises GrammarError."""
        reasoning, library = sampling.reasoning, self._library()
        assert reasoning is not None
        tokens = self._tokens.get(reasoning)
        if tokens is None:
            tokens = self._tokens[reasoning] = ReasoningTokens(
                library.tokenizer, reasoning, library.num_words, library.eos_token_ids
            )
        return ReasoningMatcher(tokens, inner, sampling.max_reasoning_tokens)


def _allow(mask: npt.NDArray[np.int32], token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1 << token_id % 32).view(np.int32)
