"""How much of a step's time a sequence is answerable for: its work, by the model's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from registry.checkpoint import ModelConfig
from workers.engine.sequence import Sequence

# How many floating-point operations a device does while it reads one byte of its memory: what
# NVIDIA states of an H200 is 989 TFLOP/s in bfloat16 and 4.8 TB/s; the CPU's figure is what a core
# measured in float32, 0.32 TFLOP/s and 31 GB/s.
FLOP_PER_BYTE = {"cuda": 206.0, "cpu": 10.0}


class DeviceWork:
    """Work in FLOP, as the roofline model has it: a byte that has to be read counts as the
    operations that the device could have done meanwhile.

    For a sequence that computes ``n`` tokens behind ``c`` in the cache, of which ``r`` have their
    logits computed::

        2 P n  +  2 V r  +  4 L H D pairs  +  B F read

    P are the parameters that a token goes through, without the vocabulary, and in a mixture only
    the experts that are chosen for it; V are the head's, 2 FLOP a parameter and token. In each of L
    layers, with H heads of D numbers, a token takes 4 H D FLOP for each of the tokens that it
    attends to, itself included: QK^T and AV, 2 each; ``pairs`` are all of these, in a layer without
    a window n c + n (n + 1) / 2. ``read`` are the tokens whose keys and values are read, c + n,
    once for all of the n; each has B bytes, and the device does F FLOP while it reads one.
    Reading the weights, which is most of a small step, is done once for all tokens of the step, so
    it falls to each in proportion to what it computes with them.

    Sources: the counts are those of Kaplan et al., "Scaling Laws for Neural Language Models"
    (2020), section 2.1; the roofline is that of Williams et al. (2009).
    """

    def __init__(self, config: ModelConfig, *, kv_token_bytes: float, flop_per_byte: float) -> None:
        """``kv_token_bytes``: of keys and values of one token in one layer."""
        hidden = config.hidden_size
        self._token_flop = 2.0 * num_token_parameters(config)
        self._row_flop = 2.0 * config.vocab_size * hidden if config.has_head else 0.0
        self._pair_flop = 4.0 * config.num_attention_heads * config.head_dim
        self._read_flop = kv_token_bytes * flop_per_byte
        self._layers = tuple(Counter(config.windows).items())
        self._is_plain = set(config.windows) == {None}
        per_token = self._pair_flop + self._read_flop
        self._context_flop = config.num_hidden_layers * per_token
        self._decode_flop = self._token_flop + self._row_flop + self._context_flop

    def chunk(self, num_tokens: int, num_context_tokens: int, num_rows: int) -> float:
        """Computing tokens behind those in the cache, with the logits of so many of them."""
        work = num_tokens * self._token_flop + num_rows * self._row_flop
        for window, num_layers in self._layers:
            pairs = _pairs(num_tokens, num_context_tokens, window)
            read = num_context_tokens + num_tokens
            if window is not None:
                read = min(read, window + num_tokens - 1)
            work += num_layers * (pairs * self._pair_flop + read * self._read_flop)
        return work

    def of_decodes(self, sequences: Iterable[Sequence]) -> list[float]:
        """Sequences that compute one token each, and its logits."""
        if not self._is_plain:
            return [self.chunk(1, sequence.num_computed_tokens, 1) for sequence in sequences]
        first, rise = self._decode_flop, self._context_flop
        return [first + rise * sequence.num_computed_tokens for sequence in sequences]

    def of(self, plan: Iterable[tuple[Sequence, int]]) -> list[float]:
        """The items of a plan that has not been computed yet."""
        return [
            self.chunk(num_tokens, sequence.num_computed_tokens, _num_rows(sequence, num_tokens))
            for sequence, num_tokens in plan
        ]


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
