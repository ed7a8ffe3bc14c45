"""From a checkpoint folder in Hugging Face layout to a decoder's weights."""

from __future__ import annotations

from pathlib import Path

import torch

from registry.checkpoint import ModelConfig, TensorIndex, open_tensors
from schemas.errors import CheckpointError, ConfigError
from workers.models.decoder import DecoderWeights, LayerWeights, Projection

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Up to here float32 is affordable on a CPU: a 5M-parameter model decodes one row a little faster
# than in bfloat16 and 32 rows a third slower. It buys tokens that do not change with the company:
# bfloat16 rounds so coarsely that a batch of another size, hence another kernel, tips close draws.
_WIDEN_MAX_PARAMETERS = 32_000_000


def choose_dtype(config: ModelConfig, dtype: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in: ``dtype`` by name, or for "auto" the checkpoint's own.

    "auto" on a CPU widens a small checkpoint to float32, which loses nothing of it.
    Raises ConfigError for an unknown name.
    """
    if dtype == "auto":
        if device.type == "cpu" and num_parameters(config) <= _WIDEN_MAX_PARAMETERS:
            return torch.float32
        return _DTYPES[config.dtype]
    if dtype not in _DTYPES:
        raise ConfigError(f"engine.dtype is {dtype!r}; choose auto, {', '.join(_DTYPES)}.")
    return _DTYPES[dtype]


def num_parameters(config: ModelConfig) -> int:
    """How many weights the decoder has, norms and biases left out."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)
    attention = heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    vocabulary = config.vocab_size * config.hidden_size
    num_vocabularies = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * (attention + mlp) + num_vocabularies * vocabulary


def load_weights(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """Read every tensor that ``config`` asks for, with q, k, v and gate, up fused.

    Raises CheckpointError naming a tensor that is missing, has another shape than the config asks
    for (with both shapes), or is in the checkpoint but has no place in this decoder.
    """
    reader = _Reader(open_tensors(path), dtype, device)
    hidden, vocabulary = config.hidden_size, config.vocab_size
    embedding = reader.tensor("model.embed_tokens.weight", (vocabulary, hidden))
    layers = tuple(_load_layer(reader, config, i) for i in range(config.num_hidden_layers))
    final_norm = reader.tensor("model.norm.weight", (hidden,))
    if config.tie_word_embeddings:
        reader.skip("lm_head.weight")
        head = embedding
    else:
        head = reader.tensor("lm_head.weight", (vocabulary, hidden))
    reader.refuse_leftovers()
    return DecoderWeights(embedding, layers, final_norm, head)


def _load_layer(reader: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    has_norms = config.qk_norm
    reader.skip(attention + "rotary_emb.inv_freq")
    return LayerWeights(
        attention_norm=reader.tensor(prefix + "input_layernorm.weight", (hidden,)),
        qkv=reader.fused(
            attention,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            num_inputs=hidden,
            bias=config.attention_bias,
        ),
        query_norm=(
            reader.tensor(attention + "q_norm.weight", (config.head_dim,)) if has_norms else None
        ),
        key_norm=(
            reader.tensor(attention + "k_norm.weight", (config.head_dim,)) if has_norms else None
        ),
        output=reader.fused(
            attention, {"o_proj": hidden}, num_inputs=queries, bias=config.attention_output_bias
        ),
        mlp_norm=reader.tensor(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=reader.fused(
            mlp,
            {"gate_proj": inner, "up_proj": inner},
            num_inputs=hidden,
            bias=config.mlp_bias,
        ),
        down=reader.fused(mlp, {"down_proj": hidden}, num_inputs=inner, bias=config.mlp_bias),
    )


class _Reader:
    """Loads tensors and remembers which, so that none is left over unnoticed."""

    def __init__(self, index: TensorIndex, dtype: torch.dtype, device: torch.device) -> None:
        self._index = index
        self._dtype = dtype
        self._device = device
        self._left = set(index)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._index.load(name, shape)
        self._left.discard(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def skip(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._left.discard(name)

    def fused(
        self, prefix: str, outputs: dict[str, int], *, num_inputs: int, bias: bool
    ) -> Projection:
        """The projections ``prefix`` + each name, one behind the other."""
        weights = [
            self.tensor(f"{prefix}{name}.weight", (size, num_inputs))
            for name, size in outputs.items()
        ]
        weight = torch.cat(weights)
        if not bias:
            return Projection(weight, None)
        biases = [self.tensor(f"{prefix}{name}.bias", (size,)) for name, size in outputs.items()]
        return Projection(weight, torch.cat(biases))

    def refuse_leftovers(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:8])
            raise CheckpointError(
                f"The checkpoint {self._index.path} holds {len(self._left)} tensors that "
                f"config.json does not account for: {names}."
            )
