"""Work of a step by sequence, by the roofline model, and the meter that charges device time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from operator import attrgetter
from typing import NamedTuple

from millrace.engine.step.sequence import Sequence
from millrace.registry.checkpoints.checkpoint import ModelConfig

# Floating-point operations that a device computes while it reads one byte of memory. cuda: NVIDIA
# states 989 TFLOP/s in bfloat16 and 4.8 TB/s for an H200. cpu: one core measured 0.32 TFLOP/s in
# float32 and 31 GB/s.
FLOP_PER_BYTE = {"cuda": 206.0, "cpu": 10.0}
# Bytes of a weight in a checkpoint that is not quantized.
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_adapter_weights = attrgetter("adapter_weights")
_proposed = attrgetter("proposed")


class Chunk(NamedTuple):
    """Tokens that a step computes of one sequence, those already in the cache, and the number of
    tokens whose logits it computes."""

    num_tokens: int
    num_context_tokens: int
    num_rows: int


class DeviceWork:
    """Work in FLOP by the roofline model: reading a byte counts as the operations that the device
    could have computed in that time.

    A sequence that computes ``n`` tokens after ``c`` cached ones, and the logits of ``r`` of them,
    in a step of N tokens and R rows of logits, costs::

        max(2 P, b P F / N) n  +  max(2 V, b V F / R) r  +  4 L H D pairs  +  B F read

    P are the parameters that each token is multiplied by, without the vocabulary; of a mixture of
    experts only the chosen experts. V are the parameters of the head. Each parameter costs 2 FLOP a
    token, and b bytes that are read once for all tokens of the step (of a mixture, for as many
    experts as these tokens can choose). F is the FLOP that the device computes while it reads one
    byte. A small step, which is bound by reading, is therefore shared by tokens, and a large one by
    FLOP.

    In each of L layers, with H heads of D numbers, a token costs 4 H D FLOP for each token that it
    attends to, itself included: 2 each for QK^T and AV. ``pairs`` counts these pairs; in a layer
    without a window they are n c + n (n + 1) / 2. ``read`` counts the tokens whose keys and values
    are read, c + n, once for all of the n; each has B bytes.

    A sequence with an adapter of A weights, which m tokens of the step use, costs max(2 A, b A F /
    m) n more, with the bytes b of the dtype.

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
        """Create the roofline model of a checkpoint.

        Args:
            config: The model's dimensions.
            kv_token_bytes: Bytes of the keys and values of one token in one layer.
            flop_per_byte: FLOP that the device computes while it reads one byte.
            weight_bytes: Bytes of a parameter, fewer if it is quantized. None: those of the
                checkpoint's dtype.
        """
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
        """Return the work of each chunk of a step."""
        num_rows = sum([chunk.num_rows for chunk in chunks])
        token_flop, row_flop = self._rates(sum([chunk.num_tokens for chunk in chunks]), num_rows)
        return [
            chunk.num_tokens * token_flop + chunk.num_rows * row_flop + self._attention(chunk)
            for chunk in chunks
        ]

    def of_decodes(self, sequences: list[Sequence]) -> list[float]:
        """Return the work of sequences that decode in a step of their own: one token, its logits,
        and the proposed tokens of each."""
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
        """Return the work of each item of a plan that has not been computed yet."""
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
        """Add the work of the items' adapters."""
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
        """Return the FLOP of the products with weights, for each token of a step and for each row
        of logits."""
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
    """Return the number of weights that a decoder multiplies each token by, without head, norms and
    biases."""
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
    """Return the number of tokens whose logits are computed."""
    if sequence.prompt_logprobs is not None:
        return num_tokens
    is_last = sequence.num_computed_tokens + num_tokens == len(sequence.token_ids)
    return int(is_last and sequence.request.pooling is None)


def _pairs(num_tokens: int, num_context_tokens: int, window: int | None) -> int:
    """Return the number of (token, attended token) pairs of a chunk in one layer."""
    num_all = num_tokens
    if window is not None:
        num_all = min(max(window - num_context_tokens, 0), num_tokens)
    pairs = num_all * num_context_tokens + num_all * (num_all + 1) // 2
    return pairs if window is None else pairs + (num_tokens - num_all) * window


class DeviceMeter:
    """Meter that shares the device's time among the sequences of each step, by their weights.

    ``busy_s`` is all of that time. ``charged_s`` is the part that was charged to sequences; they
    differ by time in which no sequence had a weight above 0.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.charged_s = 0.0
        self._since_s = 0.0

    def start(self, now_s: float) -> None:
        """Start a busy interval: the device was idle until now."""
        self._since_s = now_s

    def charge(
        self, plan: Iterable[tuple[Sequence, int]], weights: Rows[float], now_s: float
    ) -> None:
        """Charge the time since the last charge, or since ``start``, to the sequences of ``plan``.

        Items with weight 0 are not charged.
        """
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
