"""How a step's time is shared: the work of each sequence, and the meter that charges sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from operator import attrgetter
from typing import NamedTuple

from millrace.engine.step.sequence import Sequence
from millrace.registry.checkpoints.checkpoint import ModelConfig

# How many floating-point operations a device does while it reads one byte of its memory: what
# NVIDIA states of an H200 is 989 TFLOP/s in bfloat16 and 4.8 TB/s; the CPU's figure is what a core
# measured in float32, 0.32 TFLOP/s and 31 GB/s.
FLOP_PER_BYTE = {"cuda": 206.0, "cpu": 10.0}
# As wide checkpoints have them.
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_adapter_weights = attrgetter("adapter_weights")
_proposed = attrgetter("proposed")


class Chunk(NamedTuple):
    """What a step computes of one sequence: tokens behind those in the cache, and the logits of so
    many of them."""

    num_tokens: int
    num_context_tokens: int
    num_rows: int


class DeviceWork:
    """Work in FLOP, as the roofline model has it: a byte that has to be read counts as the
    operations that the device could have done meanwhile.

    For a sequence that computes ``n`` tokens behind ``c`` in the cache, of which ``r`` have their
    logits computed, in a step of N tokens and R rows of logits::

        max(2 P, b P F / N) n  +  max(2 V, b V F / R) r  +  4 L H D pairs  +  B F read

    P are the parameters that a token goes through, without the vocabulary, and in a mixture only
    the experts that are chosen for it; V are the head's. Each is 2 FLOP a token, and b bytes to
    read, once for all tokens of the step (of a mixture, as many experts as these can choose); F is
    the FLOP that the device does while it reads one byte. So a small step, which takes as long as
    its reading, is shared by tokens, and a large one by what there is to compute.

    In each of L layers, with H heads of D numbers, a token takes 4 H D FLOP for each of the tokens
    that it attends to, itself included: QK^T and AV, 2 each; ``pairs`` are all of these, in a layer
    without a window n c + n (n + 1) / 2. ``read`` are the tokens whose keys and values are read,
    c + n, once for all of the n; each has B bytes.

    A sequence with an adapter of A weights, of which m tokens of the step have it, takes
    max(2 A, b A F / m) n more, with the bytes b of the dtype.

    Sources: the counts are those of Kaplan et al., "Scaling Laws for Neural Language Models"
    (2020), section 2.1; the roofline is that of Williams et al. (2009).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_token_bytes: float,
        flop_per_byte: float,
        weight_bytes: float | None = None,
    ) -> None:
        """``kv_token_bytes``: of keys and values of one token in one layer; ``weight_bytes``: of a
        parameter, fewer where it is quantized, None for those of the checkpoint's dtype."""
        self._experts = config.experts
        self._token_parameters = num_token_parameters(config)
        self._head_parameters = config.vocab_size * config.hidden_size if config.has_head else 0
        wide_bytes = _WEIGHT_BYTES.get(config.dtype, 2)
        weight_bytes = weight_bytes or wide_bytes
        self._read_adapter_flop = wide_bytes * flop_per_byte
        self._read_parameter_flop = weight_bytes * flop_per_byte
        self._hidden_size = config.hidden_size
        self._pair_flop = 4.0 * config.num_attention_heads * config.head_dim
        self._read_flop = kv_token_bytes * flop_per_byte
        self._layers = tuple(Counter(config.windows).items())
        self._is_plain = set(config.windows) == {None}
        self._context_flop = config.num_hidden_layers * (self._pair_flop + self._read_flop)

    def of_chunks(self, chunks: list[Chunk]) -> list[float]:
        """The work of each of the chunks of a step."""
        num_rows = sum([chunk.num_rows for chunk in chunks])
        token_flop, row_flop = self._rates(sum([chunk.num_tokens for chunk in chunks]), num_rows)
        return [
            chunk.num_tokens * token_flop + chunk.num_rows * row_flop + self._attention(chunk)
            for chunk in chunks
        ]

    def of_decodes(self, sequences: list[Sequence]) -> list[float]:
        """That of sequences that compute one token each, and its logits, in a step of their own;
        with what is proposed for them."""
        if any(map(_proposed, sequences)):
            return self.of([(one, 1) for one in sequences])
        if not self._is_plain:
            return self.of_chunks([Chunk(1, one.num_computed_tokens, 1) for one in sequences])
        first = sum(self._rates(len(sequences), len(sequences))) + self._context_flop
        rise = self._context_flop
        work = [first + rise * sequence.num_computed_tokens for sequence in sequences]
        if any(map(_adapter_weights, sequences)):
            self._add_adapters(work, [(one, 1) for one in sequences])
        return work

    def of(self, plan: Iterable[tuple[Sequence, int]]) -> list[float]:
        """That of the items of a plan that has not been computed yet."""
        chunks: list[Chunk] = []
        rows: list[tuple[Sequence, int]] = []
        for sequence, num_tokens in plan:
            ahead = len(sequence.proposed)
            num_rows = _num_rows(sequence, num_tokens) + ahead
            chunks.append(Chunk(num_tokens + ahead, sequence.num_computed_tokens, num_rows))
            rows.append((sequence, num_tokens + ahead))
        work = self.of_chunks(chunks)
        self._add_adapters(work, rows)
        return work

    def _add_adapters(self, work: list[float], items: list[tuple[Sequence, int]]) -> None:
        """Add what the items' adapters take."""
        num_tokens: Counter[int] = Counter()
        for sequence, count in items:
            if sequence.adapter_weights is not None:
                num_tokens[id(sequence.adapter_weights)] += count
        for place, (sequence, count) in enumerate(items):
            weights = sequence.adapter_weights
            if weights is not None:
                reading = self._read_adapter_flop / num_tokens[id(weights)]
                work[place] += count * weights.num_weights * max(2.0, reading)

    def _rates(self, num_tokens: int, num_rows: int) -> tuple[float, float]:
        """What each token of a step, and each row of logits, costs in products with weights."""
        num_read = self._token_parameters
        if self._experts is not None:
            experts = self._experts
            num_more = min(experts.num_experts, num_tokens * experts.num_chosen)
            num_more -= experts.num_chosen
            each = 3 * self._hidden_size * experts.intermediate_size
            num_read += len(experts.layers) * num_more * each
        reading = self._read_parameter_flop
        token_flop = max(2.0 * self._token_parameters, num_read * reading / max(num_tokens, 1))
        return token_flop, self._head_parameters * max(2.0, reading / max(num_rows, 1))

    def _attention(self, chunk: Chunk) -> float:
        num_tokens, context, _ = chunk
        work = 0.0
        for window, num_layers in self._layers:
            pairs = _pairs(num_tokens, context, window)
            read = context + num_tokens
            if window is not None:
                read = min(read, window + num_tokens - 1)
            work += num_layers * (pairs * self._pair_flop + read * self._read_flop)
        return work


def num_token_parameters(config: ModelConfig) -> int:
    """The weights that each token is multiplied by in a decoder, head, norms and biases left
    out."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    attention = heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    num_mixtures, mixture = 0, 0
    if config.experts is not None:
        experts = config.experts
        num_mixtures = len(experts.layers)
        chosen = 3 * experts.num_chosen * experts.intermediate_size
        mixture = config.hidden_size * (chosen + experts.num_experts)
    num_layers = config.num_hidden_layers
    return num_layers * attention + (num_layers - num_mixtures) * mlp + num_mixtures * mixture


def _num_rows(sequence: Sequence, num_tokens: int) -> int:
    """Of how many tokens the logits are wanted."""
    if sequence.prompt_logprobs is not None:
        return num_tokens
    is_last = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
    return int(is_last and sequence.request.pooling is None)


def _pairs(num_tokens: int, num_context_tokens: int, window: int | None) -> int:
    """How many tokens those of a chunk attend to in a layer, all together."""
    num_all = num_tokens
    if window is not None:
        num_all = min(max(window - num_context_tokens, 0), num_tokens)
    pairs = num_all * num_context_tokens + num_all * (num_all + 1) // 2
    return pairs if window is None else pairs + (num_tokens - num_all) * window


class DeviceMeter:
    """Shares the time that passes among the sequences that it passes for, by their weights.

    ``busy_s`` is all of it, ``charged_s`` what sequences were charged: the same, but for time of
    which nobody had a part.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.charged_s = 0.0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        """The device was idle until now."""
        self._since_s = now_s

    def charge(
        self, plan: Iterable[tuple[Sequence, int]], weights: Rows[float], now_s: float
    ) -> None:
        """Until now, the device was busy with ``plan`` since it was charged for last, or since it
        was idle. A weight of 0 is nobody's who can be charged."""
        passed_s = now_s - self._since_s
        self._since_s = now_s
        self.busy_s += passed_s
        total = sum(weights)
        if total <= 0:
            return
        self.charged_s += passed_s
        each_s = passed_s / total
        for (sequence, _), weight in zip(plan, weights, strict=True):
            sequence.device_s += each_s * weight
