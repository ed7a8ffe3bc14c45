"""Stand-in for the runner of a device, which does nothing until somebody waits for it.

Its model is arithmetic on the tokens that it finds in the KV cache through the block tables, so a
wrong table, a stale block or a lost placeholder gives other tokens, or is noted as ``broken``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from millrace.engine.kernels.operations import WeightSize
from millrace.engine.sampling.drawing import draw, draws_of
from millrace.engine.sampling.groups import GROUP_TOKENS, largest
from millrace.engine.sampling.logits_processors import needs_logits_processor
from millrace.engine.sampling.prompt_logprobs import ScoredChunk
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.pooling import ChunkPlace, PooledChunk
from millrace.engine.step.runner import NOT_FINITE, ChosenTokens, InFlightStep
from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence
from millrace.engine.types import RunnerFigures
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams

VOCAB_SIZE = 192
POISON = 190
CONTEXT_WINDOW_TOKENS = 512
_WEIGHTS = np.random.default_rng(0).integers(1, 1 << 40, CONTEXT_WINDOW_TOKENS)
_CPU = torch.device("cpu")


class Fault(NamedTuple):
    """Fault of computing token ``position`` of a choice: at once, after half of the step's work, or
    when the step is read."""

    choice: int
    position: int
    on_read: bool


class DeviceCache:
    """Cache with tokens and positions in place of keys and values. A read or a change of blocks
    takes effect after all earlier launches."""

    def __init__(self, num_blocks: int, block_size_tokens: int, finish: Callable[[], None]) -> None:
        self.num_blocks = self.null_block = num_blocks
        self.block_size_tokens = block_size_tokens
        self.blocks = torch.zeros(1, num_blocks + 1, block_size_tokens * 8, dtype=torch.uint8)
        self.data = self.blocks.view(torch.float32)
        self.slots = self.data.view(-1, 2).numpy()
        self._finish = self.settle = finish
        self.others = None
        self.block_bytes = self.blocks.shape[0] * self.blocks.shape[2]

    def scrub(self, blocks: list[int]) -> None:
        self._finish()
        for block in blocks:
            if not self.data[:, block].isfinite().all():
                self.data[:, block] = 0.0

    def copy_block(self, source: int, target: int) -> None:
        self._finish()
        self.data[:, target] = self.data[:, source]

    def finite_blocks(self, blocks: list[int]) -> list[bool]:
        self._finish()
        return [bool(self.data[:, block].isfinite().all()) for block in blocks]


class _Item(NamedTuple):
    """Work of a step for one sequence, as the device received it."""

    sequence: Sequence
    tokens: list[int]
    begin: int
    block_table: list[int]
    samples: bool
    by_device: bool
    token_index: int
    first_output: int


class _Step:
    """Work of a step, done in order at some time before it is read."""

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.done = False
        self.finite = [True] * len(items)
        self.rows: dict[Sequence, np.ndarray] = {}
        self.chosen: dict[Sequence, int] = {}


class DeviceRunner:
    """Runner that stands in for a CUDA device.

    Args:
        chooses: The device samples supported requests; otherwise the host samples all.
        says_finite: The device reports which blocks are finite.
        faults: Faults by the prompt of the request.
        breaks: Called for each launch and each read; True makes it fail for all its requests.
        not_finite_every: One of so many contexts that end in the completion has no finite
            logits; 0 for none.
    """

    num_stages = 1
    is_row_exact = False
    likeliest = None

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size_tokens: int = 16,
        chooses: bool = True,
        says_finite: bool = True,
        faults: dict[tuple[int, ...], Fault] | None = None,
        breaks: Callable[[], bool] = lambda: False,
        not_finite_every: int = 0,
    ) -> None:
        self.config = ModelConfig(
            architecture="Double",
            hidden_size=1,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=1,
            intermediate_size=1,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=CONTEXT_WINDOW_TOKENS,
        )
        self.weight_size = WeightSize(1, 2)
        self.host_device = _CPU
        self.overlaps = chooses
        self.max_drawn_rows = None
        self.cache = DeviceCache(num_blocks, block_size_tokens, self.finish)
        self.broken: list[str] = []
        self.num_computed_tokens = 0
        self.num_unread_at_launch = 0
        self.num_failures = 0
        self._says_finite = says_finite
        self._faults = faults or {}
        self._breaks = breaks
        self._not_finite_every = not_finite_every
        self._queue: list[_Step] = []
        self._unread: list[_Step] = []
        self._failed = False
        self._last_token: dict[Sequence, int] = {}
        self._logits: torch.Tensor | None = None

    def figures(self) -> RunnerFigures:
        return RunnerFigures()

    def watch(self, wake: Callable[[], None]) -> None:
        """Ignore ``wake``: faults of this device come from launches and reads."""

    def check(self) -> None:
        """See ``watch``."""

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> NoReturn:
        raise AssertionError("it takes none")

    def launch(self, plan: list[ScheduledSequence]) -> InFlightStep:
        self._check(len(self._unread) <= 1, "two unread steps go before a launch")
        self._check(not (self._failed and self._unread), "launched again with a step unread")
        self._failed = False
        if self._logits is not None:
            self._logits.fill_(torch.nan)
        step = _Step([self._item(sequence, num_tokens) for sequence, num_tokens in plan])
        if self._breaks() or any(self._fails(item, on_read=False) for item in step.items):
            step.items = step.items[: len(plan) // 2]
            self._queue.append(step)
            self._failed = True
            self.num_failures += 1
            raise RuntimeError("the launch failed")
        self._queue.append(step)
        self.num_unread_at_launch += bool(self._unread)
        self._unread.append(step)
        by_host = [i.sequence for i in reversed(step.items) if i.samples and not i.by_device]
        by_device = [i.sequence for i in reversed(step.items) if i.samples and i.by_device]
        pooled = list(_pooled(step.items))
        scored = list(_scored(step.items))
        if by_host or pooled or scored:
            self.finish()
        self._logits = torch.tensor(
            np.array([step.rows[sequence] for sequence in by_host]).reshape(-1, VOCAB_SIZE),
            dtype=torch.float32,
        )
        return InFlightStep(
            by_device, by_host, self._logits, pooled, scored, lambda: self._read(step, by_device)
        )

    def _item(self, sequence: Sequence, num_tokens: int) -> _Item:
        begin = sequence.num_computed_tokens
        tokens = sequence.token_ids[begin : begin + num_tokens]
        complete = begin + num_tokens == len(sequence.token_ids)
        if UNREAD_TOKEN in tokens:
            known = self._unread and any(
                i.sequence is sequence and i.samples and i.by_device for i in self._unread[-1].items
            )
            self._check(bool(known), "no unread step chooses the token of a placeholder")
            self._check(tokens == [UNREAD_TOKEN] and complete, "a placeholder is out of place")
        capacity = len(sequence.block_table) * self.cache.block_size_tokens
        self._check(begin + num_tokens <= capacity, "tokens have no blocks")
        return _Item(
            sequence,
            tokens,
            begin,
            list(sequence.block_table),
            samples=complete and sequence.request.pooling is None,
            by_device=self.overlaps and _suits(sequence),
            token_index=sequence.num_output_tokens,
            first_output=sequence.num_prompt_tokens,
        )

    def _fails(self, item: _Item, *, on_read: bool) -> bool:
        fault = self._faults.get(item.sequence.request.prompt_token_ids)
        if fault is None or fault.on_read != on_read or fault.choice != item.sequence.choice:
            return False
        return item.begin <= fault.position < item.begin + len(item.tokens)

    def after_all(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of blocks that comes after all that was launched before."""

        def ordered(*arguments: Any) -> Any:
            self.finish()
            return copy(*arguments)

        return ordered

    def finish(self) -> None:
        """Wait for the device: do all launched work."""
        queue, self._queue = self._queue, []
        for step in queue:
            for number, item in enumerate(step.items):
                step.finite[number] = self._compute(item, step)
            self._choose(step)
            step.done = True

    def _compute(self, item: _Item, step: _Step) -> bool:
        size, slots = self.cache.block_size_tokens, self.cache.slots
        tokens = [self._last_token[item.sequence] if t == UNREAD_TOKEN else t for t in item.tokens]
        end = item.begin + len(tokens)
        self.num_computed_tokens += len(tokens)
        places = np.array(
            [item.block_table[p // size] * size + p % size for p in range(end)], dtype=np.int64
        )
        for place, token, position in zip(
            places[item.begin :], tokens, range(item.begin, end), strict=True
        ):
            slots[place] = token, np.nan if token == POISON else position
        finite = bool(np.isfinite(slots[places]).all())
        code = 0
        if finite:
            context = slots[places].astype(np.int64)
            ordered = bool((context[:, 1] == np.arange(end)).all())
            self._check(ordered, "a block holds other positions")
            code = int(((context[:, 0] + 1) * _WEIGHTS[:end]).sum() % (1 << 31))
            every = self._not_finite_every
            if every and end > item.first_output and code % every == 0:
                slots[places[-1], 1] = np.nan
                finite = False
        if item.samples:
            step.rows[item.sequence] = (
                _logits(code) if finite else np.full(VOCAB_SIZE, np.nan, np.float32)
            )
        return finite

    def _choose(self, step: _Step) -> None:
        """Choose tokens as the host's sampler does, in one go."""
        items = [item for item in step.items if item.samples and item.by_device]
        if not items:
            return
        rows = torch.tensor(np.array([step.rows[item.sequence] for item in items]))
        bad = rows.isnan().any(-1).tolist()
        grouped = largest(rows.nan_to_num(0.0).view(len(items), -1, GROUP_TOKENS))
        chosen = grouped.likeliest()
        samplings = [item.sequence.request.sampling for item in items]
        drawn = [i for i, sampling in enumerate(samplings) if sampling.temperature > 0]
        if drawn:
            keys = [items[i].sequence.key for i in drawn]
            draws = draws_of(drawn, [samplings[i] for i in drawn], keys, VOCAB_SIZE, _CPU)
            indices = torch.tensor([items[i].token_index for i in drawn])
            chosen.index_copy_(0, draws.rows, draw(grouped, draws, indices))
        for item, token, is_bad in zip(items, chosen.tolist(), bad, strict=True):
            self._last_token[item.sequence] = 0 if is_bad else token
            step.chosen[item.sequence] = NOT_FINITE if is_bad else token

    def _read(self, step: _Step, by_device: list[Sequence]) -> ChosenTokens:
        self._check(bool(self._unread) and self._unread[0] is step, "read out of order, or twice")
        self.finish()
        if self._breaks() or any(self._fails(item, on_read=True) for item in step.items):
            self._unread = []
            self._failed = True
            self.num_failures += 1
            raise RuntimeError("the read failed")
        self._unread.remove(step)
        return ChosenTokens(
            [step.chosen[sequence] for sequence in by_device],
            [_logprob(sequence.request.sampling, step.chosen[sequence]) for sequence in by_device],
            list(step.finite) if self._says_finite else None,
        )

    def _check(self, holds: bool, message: str) -> None:
        """Note a violation instead of raising it: the executor takes errors for a failure of the
        model."""
        if not holds:
            self.broken.append(message)


def _suits(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return not (
        needs_logits_processor(sampling)
        or sampling.grammar
        or sequence.forks
        or sequence.fork_group
        or sequence.prompt_logprobs
    )


def _logits(code: int) -> np.ndarray:
    """192 of them, no two alike; a poisoned token is never chosen."""
    row = ((np.arange(VOCAB_SIZE) * 48_271 + code) % 65_537 / 8_192).astype(np.float32)
    row[POISON] = -50.0
    return row


def _logprob(sampling: SamplingParams, token: int) -> TokenLogprob | None:
    return None if sampling.logprobs is None or token < 0 else TokenLogprob(token, -1.0)


def _pooled(items: list[_Item]) -> Iterator[PooledChunk]:
    for item in items:
        is_last = item.begin + len(item.tokens) == item.sequence.num_tokens
        if item.sequence.request.pooling is Pooling.MEAN:
            total = torch.tensor([float(sum(item.tokens))])
            yield PooledChunk(item.sequence, total, ChunkPlace(item.begin == 0, is_last))
        elif item.sequence.request.pooling is Pooling.LAST and is_last:
            total = torch.tensor([float(item.tokens[-1])])
            yield PooledChunk(item.sequence, total, ChunkPlace(is_first=True, is_last=True))


def _scored(items: list[_Item]) -> Iterator[ScoredChunk]:
    for item in items:
        sequence, known = item.sequence, item.sequence.prompt_logprobs
        if known is not None:
            end = min(item.begin + 1 + len(item.tokens), sequence.num_prompt_tokens)
            scored = range(max(item.begin + 1, len(known)), end)
            yield ScoredChunk(sequence, [TokenLogprob(sequence.token_ids[i], -i) for i in scored])
