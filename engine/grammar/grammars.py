"""Grammars of an engine: compiled before a sequence runs, and masks while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from functools import cache

import torch

from millrace.engine.grammar.compiler import GrammarCompiler, Settled
from millrace.engine.grammar.library import GrammarLibrary, Matcher
from millrace.engine.grammar.masks import MaskFiller
from millrace.engine.grammar.probe import GrammarProbe
from millrace.engine.grammar.reasoning import ReasoningMatcher, ReasoningMatchers
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import GrammarError, MillraceError
from millrace.schemas.sampling import Grammar

# A library for this many tokens is built in about 0.1 s; one for 150,000 takes 0.7 s.
_MAX_LAZY_VOCAB = 24_000

_log = logging.getLogger(__name__)


class Grammars:
    """Compiled grammars and masks of an engine, for its sequences with a grammar.

    ``tokenizer`` is called at most once, on another thread. ``on_settled`` is called on another
    thread when sequences have become ready or are over. At most ``num_helpers`` grammars are
    compiled at a time. With several ``num_stages`` of a pipeline, the next step begins before this
    one is sampled, so masks are made only when it is sampled.
    """

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Callable[[], Tokenizer | None],
        on_settled: Callable[[], None],
        *,
        num_stages: int = 1,
        num_helpers: int = 1,
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._num_helpers = num_helpers
        reasoning = ReasoningMatchers(self._library_now)
        self._compiler = GrammarCompiler(self._compile, reasoning, on_settled, num_helpers)
        self._library_lock = threading.Lock()
        self._library: GrammarLibrary | None = None
        self._refusal = ""
        self._masks: MaskFiller | None = None
        self._begun = False
        self._begins_early = num_stages == 1

    def prepare(self) -> None:
        """Build the shared library in the background if the vocabulary is large.

        Otherwise the first grammar would delay other work: Python is blocked for most of the build.
        """
        if self._vocab_size > _MAX_LAZY_VOCAB:
            self._compiler.run_soon(self._build_quietly)

    def submit(self, choices: Rows[Sequence]) -> None:
        """Make the choices of a request ready."""
        self._compiler.submit(choices)

    def pop_settled(self) -> list[Settled]:
        """Return the requests that are over before they ran, without those cancelled meanwhile."""
        settled = self._compiler.pop_settled()
        return [s for s in settled if s.sequence.state is not SequenceState.FINISHED]

    def start_masks(self, plan: Iterable[tuple[Sequence, int]]) -> None:
        """Start to fill the masks for a step's samples, before the model runs.

        ``plan`` has the number of tokens that are computed of each sequence. Forks that begin where
        it ends are sampled, too.
        """
        if self._begins_early:
            self._begin(
                [
                    choice
                    for sequence, num_tokens in plan
                    if sequence.matcher is not None and sequence.num_uncomputed_tokens == num_tokens
                    for choice in (sequence, *sequence.forks)
                ]
            )

    def masks(self, sequences: Rows[Sequence], ahead: int = 0) -> torch.Tensor | None:
        """Return the masks of the sequences, after ``ahead`` of their proposed tokens.

        Returns:
            int32 [len(sequences), ceil(vocab_size / 32)]: the allowed tokens. None if every token
                is allowed for all sequences.
        """
        if not self._begins_early:
            self._begin([sequence for sequence in sequences if sequence.matcher is not None])
        if not self._begun or self._masks is None:
            return None
        return self._masks.take(sequences, ahead)

    def _begin(self, constrained: list[Sequence]) -> None:
        self._begun = bool(constrained)
        if not constrained:
            return
        if self._masks is None:
            library = self._library_now()
            self._masks = MaskFiller(library.num_words, library.eos_token_ids)
        self._masks.begin(constrained)

    def num_ahead(self, sequence: Sequence) -> int:
        """Return after how many of its proposed tokens a sequence with a grammar has ``masks``.

        Call it after ``masks`` for its next token.
        """
        return 0 if self._masks is None else self._masks.num_ahead(sequence)

    def accept(self, sequence: Sequence, token: int) -> bool:
        """Advance the grammar by a sampled token; return whether it is complete.

        False without a grammar. Raises GrammarError when it cannot be followed any further.
        """
        matcher: Matcher | ReasoningMatcher | None = sequence.matcher
        if matcher is None:
            return False
        matcher.accept((token,))
        return matcher.complete

    def _compile(self, grammar: Grammar) -> Matcher:
        library = self._library_now()
        _probe(self._num_helpers).check(grammar)
        return library.compile(grammar)

    def _library_now(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None and not self._refusal:
                self._build()
            if self._library is None:
                raise GrammarError(self._refusal)
            return self._library

    def _build(self) -> None:
        try:
            tokenizer = self._tokenizer()
            if tokenizer is None:
                self._refusal = "This model's checkpoint has no tokenizer, which grammars need."
            else:
                self._library = GrammarLibrary(tokenizer, self._vocab_size)
        except GrammarError as error:
            self._refusal = error.message
        except (MillraceError, ValueError) as error:
            _log.warning("no grammars for this model: %s", error)
            self._refusal = "This model's tokenizer cannot be used for grammars."

    def _build_quietly(self) -> None:
        try:
            self._library_now()
        except GrammarError as error:
            _log.info("no grammars for this model: %s", error.message)


@cache
def _probe(num_helpers: int) -> GrammarProbe:
    """Return the probe that all engines of the process share."""
    return GrammarProbe(num_helpers=num_helpers)
