"""The step loop: take requests, plan, run the model, sample, hand the tokens over."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from registry.tokenizer import Tokenizer
from schemas.config import EngineConfig
from schemas.errors import GrammarError, MillraceError
from schemas.frames import FinishReason, TokenLogprob
from schemas.sampling import MAX_SEED
from workers.engine.admission import check_config, check_kind, finished_before, longest_total_tokens
from workers.engine.block_tables import BlockTables
from workers.engine.checkpoint_tokenizer import checkpoint_tokenizer
from workers.engine.choices import make_choices
from workers.engine.cost_model import CostModel, StepWork
from workers.engine.grammar import Grammars
from workers.engine.host_cache import HostCache
from workers.engine.host_memory import PlainHostMemory
from workers.engine.outputs import (
    as_millrace_error,
    embedding_output,
    error_output,
    finished_output,
    refusal,
    started_output,
    token_output,
)
from workers.engine.planner import Planner, ScheduledSequence
from workers.engine.pooling import PooledChunk, add_chunk
from workers.engine.runner import ModelRunner
from workers.engine.sampler import Sampler
from workers.engine.sampling.prompt_logprobs import ScoredChunk, add_scores
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.types import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    NonFiniteEmbeddingError,
    NonFiniteLogitsError,
)

_log = logging.getLogger(__name__)

# How long commands wait, at most, while a step waits for sequences to become ready.
_UNREADY_WAIT_S = 0.005


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbelow(MAX_SEED + 1)


class Engine:
    """Continues many requests at once. Not thread-safe: one caller adds, cancels and steps.

    Every request that is added ends in exactly one output that is ``finished``, unless it is
    cancelled. What goes wrong with one request ends that request only. A request's tokens depend
    on its own prompt, parameters and seed, not on who else is in the batch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        seed_source: Callable[[], int] = draw_seed,
        monotonic: Callable[[], float] = time.perf_counter,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._sampler = Sampler(runner.config.vocab_size, runner.cache.data.device, tokenizer)
        self._costs = CostModel()
        host_memory = PlainHostMemory(runner.cache, config.host_cache_bytes)
        self._host = HostCache(host_memory, monotonic=monotonic)
        self._tables = BlockTables.make(
            runner.cache.num_blocks,
            config.block_size_tokens,
            runner.cache,
            shared=config.prefix_cache,
            host=self._host,
            idle_offload_s=config.idle_offload_s,
        )
        self._pool = self._tables.pool
        self._planner = Planner(
            self._tables,
            max_batch_tokens=config.max_batch_tokens,
            max_num_sequences=config.max_num_sequences,
            ageing_s=config.ageing_s,
            itl_bound_s=config.itl_bound_ms / 1e3,
            costs=self._costs,
            monotonic=monotonic,
        )
        self._seed_source = seed_source
        self._monotonic = monotonic
        self._choices: dict[str, list[Sequence]] = {}
        self._outputs: list[EngineOutput] = []
        self._readied = threading.Event()
        self._grammars = Grammars(runner.config.vocab_size, tokenizer, self._readied.set)
        self._num_arrived = 0
        self._num_steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._busy_s = 0.0

    @classmethod
    def load(cls, path: Path, config: EngineConfig) -> Engine:
        """An engine for the checkpoint folder ``path``. Raises CheckpointError or ConfigError."""
        check_config(config)
        runner = ModelRunner.load(path, config)
        engine = cls(runner, config, tokenizer=checkpoint_tokenizer(path))
        engine._grammars.prepare()
        return engine

    @property
    def context_window_tokens(self) -> int:
        return self._runner.config.context_window_tokens

    @property
    def max_tokens_per_request(self) -> int:
        """The longest prompt + completion that context window and KV cache can ever hold."""
        return min(self.context_window_tokens, self._pool.capacity_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._choices or self._outputs)

    def add(self, request: EngineRequest) -> None:
        """Take a request; one that cannot be served is answered with an error at the next step.

        A request with the id of a live one takes its place.
        """
        self.cancel(request.request_id)
        try:
            check_kind(request, has_head=self._runner.config.has_head)
            max_total_tokens = longest_total_tokens(
                request,
                vocab_size=self._runner.config.vocab_size,
                context_window_tokens=self.context_window_tokens,
                capacity_tokens=self._pool.capacity_tokens,
            )
        except MillraceError as error:
            self._outputs.append(refusal(request, error))
            return
        finish_reason = finished_before(request, max_total_tokens)
        if finish_reason is not None:
            self._outputs.append(finished_output(request, finish_reason))
            return
        seed = request.sampling.seed
        choices = make_choices(
            request,
            arrival=self._num_arrived,
            seed=self._seed_source() if seed is None else seed,
            max_total_tokens=max_total_tokens,
            added_s=self._monotonic(),
        )
        try:
            for sequence in choices:
                self._sampler.begin(sequence)
        except MillraceError as error:
            self._outputs.append(refusal(request, error))
            return
        self._num_arrived += len(choices)
        self._choices[request.request_id] = choices
        if request.sampling.grammar is not None:
            self._grammars.submit(choices)
        self._planner.add(choices[0])

    def cancel(self, request_id: str) -> None:
        """Forget a request, in whatever state; its blocks are free when this returns."""
        for sequence in self._choices.pop(request_id, ()):
            self._planner.remove(sequence)
            self._sampler.end(sequence)
        if self._outputs:
            self._outputs = [o for o in self._outputs if o.request_id != request_id]

    def step(self) -> list[EngineOutput]:
        """Compute one batch; what it made, and the answers to requests refused since the last.

        When nothing but sequences that are not ready is there, this waits a moment for one, so
        that a caller may step as long as there is work.
        """
        outputs, self._outputs = self._outputs, []
        self._readied.clear()
        self._end_settled(outputs)
        plan = self._planner.plan()
        if plan:
            started = self._monotonic()
            for sequence, _ in plan:
                if not sequence.started:
                    sequence.queued_s = started - sequence.added_s
            self._execute(plan, outputs)
            self._num_steps += 1
            self._busy_s += self._monotonic() - started
        elif not outputs and self._planner.num_unready == self._planner.num_live > 0:
            self._readied.wait(_UNREADY_WAIT_S)
        return outputs

    def _end_settled(self, outputs: list[EngineOutput]) -> None:
        """End what has turned out to be over while it waited for its grammar."""
        for sequence, error in self._grammars.take_settled():
            if error is not None:
                self._fail(sequence, error, outputs)
            else:
                outputs.append(finished_output(sequence.request, FinishReason.STOP))
                self._end(sequence)

    def wake(self) -> None:
        """Have a step that waits for sequences to become ready look at once; for any thread."""
        self._readied.set()

    def _execute(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Run a plan; when the model fails on it, halve it until those at fault stand alone."""
        begin = self._monotonic()
        work = StepWork.of(plan)
        for sequence, _ in plan:
            sequence.contents_finite = False
        self._grammars.begin_masks(plan)
        try:
            result = self._runner.run(plan)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
            if len(plan) > 1:
                middle = len(plan) // 2
                self._execute(plan[:middle], outputs)
                self._execute(plan[middle:], outputs)
                return
            _log.exception("the model failed on one sequence")
            self._fail(plan[0].sequence, as_millrace_error(error), outputs)
            return
        self._planner.advance(plan)
        self._seal_chunks(plan, outputs)
        self._pool_states(result.pooled, outputs)
        self._add_scores(result.scored, outputs)
        self._sample(result.sequences, result.logits, outputs)
        self._costs.observe(work, self._monotonic() - begin)
        self._prefill_tokens += work.prefill_tokens
        self._decode_tokens += work.decodes
        for sequence, _ in plan:
            if not sequence.started and sequence.state is not SequenceState.FINISHED:
                sequence.started = True
                outputs.append(started_output(sequence))

    def _seal_chunks(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Look whether what was computed of prompts is finite. A token that decodes need not be
        looked at: its logits tell."""
        size = self._pool.block_size_tokens
        chunks: list[tuple[Sequence, list[int]]] = []
        for sequence, num_tokens in plan:
            if num_tokens > 1 or sequence.num_uncomputed_tokens:
                first = (sequence.num_computed_tokens - num_tokens) // size
                end = self._pool.blocks_for(sequence.num_computed_tokens)
                chunks.append((sequence, sequence.block_table[first:end]))
        if not chunks:
            return
        finite = iter(self._runner.cache.finite_blocks([b for _, blocks in chunks for b in blocks]))
        for sequence, blocks in chunks:
            flags = [next(finite) for _ in blocks]
            if all(flags):
                sequence.contents_finite = True
                self._tables.seal(sequence)
            else:
                self._fail(sequence, NonFiniteLogitsError(sequence.num_output_tokens), outputs)

    def _pool_states(self, chunks: list[PooledChunk], outputs: list[EngineOutput]) -> None:
        """Take what was computed into embeddings, and end the sequences whose are complete."""
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            embedding = add_chunk(chunk)
            if embedding is None:
                continue
            if all(map(math.isfinite, embedding)):
                sequence.contents_finite = True
                outputs.append(embedding_output(sequence, embedding))
                self._end(sequence)
            else:
                self._fail(sequence, NonFiniteEmbeddingError(), outputs)

    def _add_scores(self, chunks: list[ScoredChunk], outputs: list[EngineOutput]) -> None:
        """Take what was computed of prompts' log-probabilities."""
        for chunk in chunks:
            if chunk.sequence.state is SequenceState.RUNNING and not add_scores(chunk):
                self._fail(chunk.sequence, NonFiniteLogitsError(0), outputs)

    def _sample(
        self, computed: list[Sequence], logits: torch.Tensor, outputs: list[EngineOutput]
    ) -> None:
        """Draw the next token of each sequence, and the first ones of choices that begin here."""
        sequences: list[Sequence] = []
        index: list[int] = []
        for row, sequence in enumerate(computed):
            if sequence.state is SequenceState.RUNNING:
                sequences += (sequence, *sequence.forks)
                index += [row] * (1 + len(sequence.forks))
                self._fork(sequence)
        if not sequences:
            return
        with torch.inference_mode():
            if len(index) != len(computed) or len(sequences) != len(computed):
                logits = logits.index_select(0, torch.tensor(index, device=logits.device))
        sampled = self._sampler.sample(sequences, logits, self._grammars.masks(sequences))
        for sequence, outcome, logprob in zip(
            sequences, sampled.outcomes, sampled.logprobs, strict=True
        ):
            if isinstance(outcome, MillraceError):
                self._fail(sequence, outcome, outputs)
            else:
                self._append(sequence, outcome, logprob, outputs)

    def _fork(self, parent: Sequence) -> None:
        """Let the choices that waited for the parent's prompt go their own ways."""
        forks, parent.forks = parent.forks, []
        for child in forks:
            child.queued_s = parent.queued_s
            child.num_cached_tokens = parent.num_cached_tokens
            self._planner.fork(parent, child)

    def _append(
        self,
        sequence: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        outputs: list[EngineOutput],
    ) -> None:
        sequence.contents_finite = True
        try:
            complete = self._grammars.accept(sequence, token)
        except GrammarError as error:
            self._fail(sequence, error, outputs)
            return
        sequence.token_ids.append(token)
        if sequence.num_computed_tokens % self._pool.block_size_tokens == 0:
            self._tables.seal(sequence)
        finish_reason = None
        if complete or token in sequence.stop_token_ids:
            finish_reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_total_tokens:
            finish_reason = FinishReason.LENGTH
        outputs.append(token_output(sequence, token, logprob, finish_reason))
        sequence.started = True
        if finish_reason is not None:
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: MillraceError, outputs: list[EngineOutput]) -> None:
        """End a sequence, and those that wait for its prompt, with an error."""
        for ended in (sequence, *sequence.forks):
            outputs.append(error_output(ended, error))
            self._end(ended)

    def _end(self, sequence: Sequence) -> None:
        choices = self._choices[sequence.request_id]
        choices.remove(sequence)
        if not choices:
            del self._choices[sequence.request_id]
        self._planner.remove(sequence)
        self._sampler.end(sequence)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._planner.running),
            num_waiting=self._planner.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_idle_blocks=self._pool.num_idle_blocks,
            num_steps=self._num_steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            num_preemptions=self._planner.num_preemptions,
            busy_s=self._busy_s,
            outstanding_tokens=self._planner.outstanding_tokens,
            max_tokens_per_request=self.max_tokens_per_request,
            prefix_query_tokens=self._tables.num_query_tokens,
            prefix_hit_tokens=self._tables.num_hit_tokens,
            num_evicted_blocks=self._tables.num_evicted_blocks,
            num_host_blocks=self._host.num_slots,
            num_used_host_blocks=len(self._host),
            num_offloaded_blocks=self._host.num_stored_blocks,
            num_reloaded_blocks=self._host.num_loaded_blocks,
            num_swaps=self._tables.num_swaps,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless choices, planner, cache and pool agree."""
        self._planner.check_integrity()
        live = [sequence for choices in self._choices.values() for sequence in choices]
        forming = {fork for sequence in live for fork in sequence.forks}
        assert self._planner.num_live == len(live) - len(forming)
        assert forming.issubset(live)
        for sequence in live:
            assert (sequence.state is SequenceState.FORMING) == (sequence in forming)
            assert sequence.state is not SequenceState.FINISHED
