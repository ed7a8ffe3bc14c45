"""Running a plan, and taking what came of it to the sequences."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from operator import attrgetter

import torch

from schemas.errors import MillraceError
from schemas.frames import FinishReason, TokenLogprob
from workers.engine.cost_model import CostModel, StepWork
from workers.engine.grammar import Grammars
from workers.engine.launched import LaunchedStep
from workers.engine.live import LiveRequests
from workers.engine.outputs import as_millrace_error, embedding_output, token_output
from workers.engine.planner import Planner, ScheduledSequence
from workers.engine.pooling import PooledChunk, add_chunk
from workers.engine.runner import ModelRunner
from workers.engine.sampler import Sampler
from workers.engine.sampling.prompt_logprobs import ScoredChunk, add_scores
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.types import EngineOutput, NonFiniteEmbeddingError, NonFiniteLogitsError

_log = logging.getLogger(__name__)

_forks = attrgetter("forks")
_matcher = attrgetter("matcher")


class Executor:
    """Does what was planned. What goes wrong with one sequence ends that sequence only."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        planner: Planner,
        sampler: Sampler,
        grammars: Grammars,
        live: LiveRequests,
        costs: CostModel,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._tables = planner.tables
        self._block_size = planner.tables.pool.block_size_tokens
        self._sampler = sampler
        self._grammars = grammars
        self._live = live
        self._costs = costs
        self._monotonic = monotonic
        self.prefill_tokens = 0
        self.decode_tokens = 0

    def execute(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Run a plan; when the model fails on it, halve it until those at fault stand alone."""
        begin_s = self._monotonic()
        work = StepWork.of(plan)
        step = self._launch(plan, outputs)
        if step is None:
            if len(plan) > 1:
                middle = len(plan) // 2
                self.execute(plan[:middle], outputs)
                self.execute(plan[middle:], outputs)
            return
        self._planner.advance(plan)
        self._seal_chunks(plan, outputs)
        self._pool_states(step.pooled, outputs)
        self._add_scores(step.scored, outputs)
        self._sample(step.by_host, step.logits, outputs)
        self._costs.observe(work, self._monotonic() - begin_s)
        self.prefill_tokens += work.prefill_tokens
        self.decode_tokens += work.decodes

    def _launch(
        self, plan: list[ScheduledSequence], outputs: list[EngineOutput]
    ) -> LaunchedStep | None:
        """What the model makes of a plan; None if it fails, which ends one that stands alone."""
        try:
            self._grammars.begin_masks(plan)
            return self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
            if len(plan) == 1:
                self._blame(plan[0].sequence, error, outputs)
            return None

    def _blame(self, sequence: Sequence, error: Exception, outputs: list[EngineOutput]) -> None:
        """End the one sequence that an error came from."""
        if not isinstance(error, MillraceError):
            _log.error("the engine failed on one sequence", exc_info=error)
        self._live.fail(sequence, as_millrace_error(error), outputs)

    def _seal_chunks(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Look whether what was computed of prompts is finite. A token that decodes need not be
        looked at: its logits tell."""
        size = self._block_size
        chunks: list[tuple[Sequence, list[int]]] = []
        for sequence, num_tokens in plan:
            end = sequence.num_computed_tokens
            if num_tokens > 1 or end < len(sequence.token_ids):
                table = sequence.block_table[(end - num_tokens) // size : -(-end // size)]
                chunks.append((sequence, table))
        if not chunks:
            return
        self._seal(chunks, outputs)

    def _seal(self, chunks: list[tuple[Sequence, list[int]]], outputs: list[EngineOutput]) -> None:
        """Seal what is finite of chunks and their blocks; failing on all, look at half of them."""
        try:
            all_blocks = [block for _, blocks in chunks for block in blocks]
            finite = iter(self._runner.cache.finite_blocks(all_blocks))
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
            if len(chunks) == 1:
                self._blame(chunks[0][0], error, outputs)
                return
            middle = len(chunks) // 2
            self._seal(chunks[:middle], outputs)
            self._seal(chunks[middle:], outputs)
            return
        for sequence, blocks in chunks:
            flags = [next(finite) for _ in blocks]
            if all(flags):
                self._tables.seal(sequence)
            else:
                self._live.fail(sequence, NonFiniteLogitsError(sequence.num_output_tokens), outputs)

    def _pool_states(self, chunks: list[PooledChunk], outputs: list[EngineOutput]) -> None:
        """Take what was computed into embeddings, and end the sequences whose are complete."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            try:
                embedding = add_chunk(chunk)
            except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
                self._blame(sequence, error, outputs)
                continue
            if embedding is None:
                continue
            if all(map(math.isfinite, embedding)):
                outputs.append(embedding_output(sequence, embedding))
                self._live.end(sequence)
            else:
                self._live.fail(sequence, NonFiniteEmbeddingError(), outputs)

    def _add_scores(self, chunks: list[ScoredChunk], outputs: list[EngineOutput]) -> None:
        """Take what was computed of prompts' log-probabilities."""
        for chunk in chunks:
            if chunk.sequence.state is not SequenceState.RUNNING:
                continue
            try:
                finite = add_scores(chunk)
            except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
                self._blame(chunk.sequence, error, outputs)
                continue
            if not finite:
                self._live.fail(chunk.sequence, NonFiniteLogitsError(0), outputs)

    def _sample(
        self, computed: list[Sequence], logits: torch.Tensor, outputs: list[EngineOutput]
    ) -> None:
        """Draw the next token of each sequence, and the first ones of choices that begin here."""
        index = [i for i, s in enumerate(computed) if s.state is SequenceState.RUNNING]
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
            masks = self._grammars.masks(sequences) if any(map(_matcher, sequences)) else None
        except Exception as error:  # noqa: BLE001 (it ends the sequences with a grammar only)
            for sequence in filter(_matcher, sequences):
                self._blame(sequence, error, outputs)
            self._sample(sequences, logits, outputs)
            return
        sampled = self._sampler.sample(sequences, logits, masks)
        for sequence, outcome, logprob in zip(
            sequences, sampled.outcomes, sampled.logprobs, strict=True
        ):
            if isinstance(outcome, MillraceError):
                self._live.fail(sequence, outcome, outputs)
            else:
                self._append(sequence, outcome, logprob, outputs)

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """Let the choices that waited for the parent's prompt go their own ways; all of them."""
        forks, parent.forks = parent.forks, []
        for child in forks:
            child.queued_s = parent.queued_s
            child.num_cached_tokens = parent.num_cached_tokens
            self._planner.fork(parent, child)
        return [parent, *forks]

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        outputs: list[EngineOutput],
    ) -> None:
        try:
            complete = self._grammars.accept(sequence, token)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
            self._blame(sequence, error, outputs)
            return
        sequence.token_ids.append(token)
        if sequence.num_computed_tokens % self._block_size == 0:
            self._tables.seal(sequence)
        finish_reason = None
        if complete or token in sequence.stop_token_ids:
            finish_reason = FinishReason.STOP
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        outputs.append(token_output(sequence, token, logprob, finish_reason))
        sequence.started = True
        if finish_reason is not None:
            self._live.end(sequence)
