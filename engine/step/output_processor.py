"""Processing of a step's results: applies them to sequences and appends outputs."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import NamedTuple

import torch

from millrace.engine.grammar.grammars import Grammars
from millrace.engine.kv.cache import KVCache
from millrace.engine.sampling.logprobs import candidates
from millrace.engine.sampling.prompt_logprobs import ScoredChunk, add_scores
from millrace.engine.sampling.sampler import Sampled, Sampler
from millrace.engine.scheduling.planner import Planner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.fork_group import ForkGroup
from millrace.engine.step.live_requests import LiveRequests
from millrace.engine.step.outputs import embedding_output, token_output
from millrace.engine.step.pooling import PooledChunk, add_chunk
from millrace.engine.step.runner import NOT_FINITE, ChosenTokens
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import (
    EngineOutput,
    NonFiniteEmbeddingError,
    NonFiniteLogitsError,
)
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob

_forks = attrgetter("forks")
_matcher = attrgetter("matcher")
_fork_group = attrgetter("fork_group")


class Chunk(NamedTuple):
    """Tokens from ``begin`` to ``end`` of a sequence, computed by a step."""

    sequence: Sequence
    begin: int
    end: int


class OutputProcessor:
    """Processor of results for live sequences. An error of one sequence ends that sequence only."""

    def __init__(
        self,
        *,
        cache: KVCache,
        planner: Planner,
        sampler: Sampler,
        grammars: Grammars,
        live: LiveRequests,
    ) -> None:
        self._cache = cache
        self._planner = planner
        self._tables = planner.tables
        self._block_size = planner.tables.pool.block_size_tokens
        self.sampler = sampler
        self._grammars = grammars
        self.live = live

    def fail_where_not_finite(
        self, plan: list[ScheduledSequence], finite: list[bool], outputs: list[EngineOutput]
    ) -> None:
        """End the sequences whose computed numbers include NaN or infinity."""
        for (sequence, _), is_finite in zip(plan, finite, strict=True):
            if not is_finite and sequence.state is not SequenceState.FINISHED:
                self._fail_not_finite(sequence, outputs)

    def cache_chunks(self, chunks: list[Chunk]) -> None:
        """Put the full blocks of finite chunks into the prefix cache."""
        for sequence, _, end in chunks:
            if sequence.state is SequenceState.RUNNING:
                self._tables.cache_full_blocks(sequence, end)

    def cache_finite_chunks(self, chunks: list[Chunk], outputs: list[EngineOutput]) -> None:
        """Cache the finite chunks and fail the others.

        If the check itself fails, bisect the chunks.
        """
        size = self._block_size
        here = [chunk for chunk in chunks if chunk.sequence.state is SequenceState.RUNNING]
        tables = [s.block_table[begin // size : -(-end // size)] for s, begin, end in here]
        if not here:
            return
        try:
            finite = iter(self._cache.finite_blocks([block for table in tables for block in table]))
        except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
            if len(here) == 1:
                self.live.fail(here[0].sequence, error, outputs)
                return
            middle = len(here) // 2
            self.cache_finite_chunks(here[:middle], outputs)
            self.cache_finite_chunks(here[middle:], outputs)
            return
        for (sequence, _, end), table in zip(here, tables, strict=True):
            flags = [next(finite) for _ in table]
            if sequence.state is not SequenceState.RUNNING:
                continue  # its fork group has failed
            if all(flags):
                self._tables.cache_full_blocks(sequence, end)
            else:
                self._fail_not_finite(sequence, outputs)

    def _fail_not_finite(self, sequence: Sequence, outputs: list[EngineOutput]) -> None:
        error = NonFiniteLogitsError(sequence.num_read_output_tokens)
        self.live.fail(sequence, error, outputs)

    def add_pooled(self, chunks: list[PooledChunk], outputs: list[EngineOutput]) -> None:
        """Add chunks to embeddings, and end the sequences whose embedding is complete."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            try:
                embedding = add_chunk(chunk)
            except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
                self.live.fail(sequence, error, outputs)
                continue
            if embedding is None:
                continue
            if all(map(math.isfinite, embedding)):
                outputs.append(embedding_output(sequence, embedding))
                self.live.finish(sequence, outputs)
            else:
                self.live.fail(sequence, NonFiniteEmbeddingError(), outputs)

    def add_scores(self, chunks: list[ScoredChunk], outputs: list[EngineOutput]) -> None:
        """Add chunks to the log-probabilities of prompts."""
        for chunk in chunks:
            if chunk.sequence.state is not SequenceState.RUNNING:
                continue
            try:
                finite = add_scores(chunk)
            except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
                self.live.fail(chunk.sequence, error, outputs)
                continue
            if not finite:
                self.live.fail(chunk.sequence, NonFiniteLogitsError(0), outputs)

    def accept_device_tokens(
        self,
        sequences: list[Sequence],
        places: list[int],
        chosen: ChosenTokens,
        outputs: list[EngineOutput],
    ) -> None:
        """Put the tokens that the device chose in their places.

        Tokens of finished sequences are dropped. A preempted sequence gets its token, too.
        """
        finished = SequenceState.FINISHED
        for sequence, place, token, logprob in zip(
            sequences, places, chosen.tokens, chosen.logprobs, strict=True
        ):
            if sequence.state is finished:
                continue
            if token == NOT_FINITE:
                self._fail_not_finite(sequence, outputs)
            else:
                sequence.token_ids[place] = token
                self._emit_token(sequence, place, token, logprob, outputs)

    def sample(
        self,
        computed: list[Sequence],
        logits: torch.Tensor,
        outputs: list[EngineOutput],
        ahead: int = 0,
    ) -> None:
        """Sample the next token of each sequence, and the first token of each choice that forks.

        ``logits`` are those after the first ``ahead`` proposed tokens.
        """
        if any(map(_fork_group, computed)):
            self._hold_forks(computed, logits, outputs)
        index = [
            i
            for i, s in enumerate(computed)
            if s.state is SequenceState.RUNNING and s.fork_group is None
        ]
        sequences = [computed[i] for i in index]
        if any(map(_forks, sequences)):
            index = [i for i in index for _ in range(1 + len(computed[i].forks))]
            sequences = [choice for parent in sequences for choice in self._fork(parent)]
        if not sequences:
            return
        if len(index) != len(computed) or len(sequences) != len(set(index)):
            with torch.inference_mode():
                logits = logits.index_select(0, torch.tensor(index, device=logits.device))
        try:
            guided = any(map(_matcher, sequences))
            masks = self._grammars.masks(sequences, ahead) if guided else None
        except Exception as error:  # noqa: BLE001 (it ends the sequences with a grammar only)
            for sequence in filter(_matcher, sequences):
                self.live.fail(sequence, error, outputs)
            self.sample(sequences, logits, outputs, ahead)
            return
        self.accept(sequences, self.sampler.sample(sequences, logits, masks), outputs, ahead)

    def accept(
        self, sequences: list[Sequence], sampled: Sampled, outputs: list[EngineOutput], ahead: int
    ) -> None:
        """Append its sampled token to each sequence, after ``ahead`` accepted proposed tokens."""
        for sequence, outcome, logprob in zip(
            sequences, sampled.outcomes, sampled.logprobs, strict=True
        ):
            if isinstance(outcome, MillraceError):
                self.live.fail(sequence, outcome, outputs)
            else:
                self._append(sequence, outcome, logprob, outputs, ahead)

    def _hold_forks(
        self, computed: list[Sequence], logits: torch.Tensor, outputs: list[EngineOutput]
    ) -> None:
        """Hold the sequences that a client leads, with their candidates."""
        rows: dict[ForkGroup, list[int]] = {}
        for row, sequence in enumerate(computed):
            if sequence.fork_group is not None:
                rows.setdefault(sequence.fork_group, []).append(row)
        for group, own in rows.items():
            sequences = [computed[row] for row in own]
            first = sequences[0]
            if first.state is not SequenceState.RUNNING:
                continue  # they end together
            temperature, count = group.request.sampling.temperature, group.num_candidates
            try:
                found = candidates(logits[own], temperature, count, group.excluded)
            except Exception as error:  # noqa: BLE001 (any error ends one group only)
                self.live.fail(first, error, outputs)
                continue
            if found is None:
                self._fail_not_finite(first, outputs)
                continue
            for sequence, ways in zip(sequences, found, strict=True):
                self.live.hold(sequence, ways)

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """Fork the choices that waited for the parent's prompt; return the parent and then the
        forks."""
        forks, parent.forks = parent.forks, []
        for child in forks:
            child.queued_s = parent.queued_s
            child.num_cached_tokens = parent.num_cached_tokens
            child.features = None if parent.features is None else parent.features.copy()
            child.num_pulled_tokens = parent.num_pulled_tokens
            child.pulled_s = parent.pulled_s
            self._planner.fork(parent, child)
        return [parent, *forks]

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        outputs: list[EngineOutput],
        ahead: int,
    ) -> None:
        complete = False
        if sequence.matcher is not None:
            try:
                complete = self._grammars.accept(sequence, token)
            except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
                self.live.fail(sequence, error, outputs)
                return
        place = len(sequence.token_ids)
        sequence.token_ids.append(token)
        self._emit_token(sequence, place, token, logprob, outputs, complete=complete, ahead=ahead)

    def _emit_token(
        self,
        sequence: Sequence,
        place: int,
        token: int,
        logprob: TokenLogprob | None,
        outputs: list[EngineOutput],
        *,
        complete: bool = False,
        ahead: int = 0,
    ) -> None:
        """Output ``token``, the sequence's token number ``place``.

        All tokens before it are computed, ``ahead`` of them as proposed tokens. End the sequence if
        this is its last token.
        """
        if place % self._block_size == 0 and sequence.state is SequenceState.RUNNING:
            self._tables.cache_full_blocks(sequence, place)
        finish_reason = None
        if complete or token in sequence.stop_token_ids:
            finish_reason = FinishReason.STOP
        elif place + 1 >= sequence.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        num_proposed = num_accepted = 0
        if proposed := sequence.proposed:
            num_proposed = 0 if ahead else len(proposed)
            num_accepted = int(ahead < len(proposed) and token == proposed[ahead])
        outputs.append(
            token_output(sequence, token, logprob, finish_reason, num_proposed, num_accepted)
        )
        sequence.started = True
        if finish_reason is not None:
            self.live.finish(sequence, outputs)
