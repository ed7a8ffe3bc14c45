"""Calibration: runs a decoder over texts and quantizes each layer by the inputs of its maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.operations import TorchMetadata, TorchOperations
from millrace.engine.kernels.operations import Linear, WeightSize
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.loader import load_weights
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.engine.quantizer.gptq import gptq_int4
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import ModelConfig, TensorIndex
from millrace.schemas.errors import CheckpointError

# Limit of a text, in tokens, and of the texts that run together.
MAX_TEXT_TOKENS = 1024
_BATCH_TOKENS = 4096
_BLOCK_TOKENS = 16
# Prefix of the layer in a decoder of one layer.
_FIRST = "layers.0."


class _RecordedLinear(Linear):
    """Linear map in float32 that sums x x^T over its input rows x until it is quantized.

    ``names`` are the tensors that make up its outputs, with the number of outputs of each.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, names: list[tuple[str, int]]
    ) -> None:
        self.names = names
        self.weight = weight
        self.size = WeightSize.of(weight)
        self._bias = bias
        self.hessian: torch.Tensor | None = weight.new_zeros(weight.shape[1], weight.shape[1])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.hessian is not None:
            self.hessian.addmm_(rows.t(), rows)
        return F.linear(rows, self.weight, self._bias)

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows)


class _LayerTensors:
    """Tensors of one layer, presented as a decoder of that layer alone.

    Its embedding and last norm are placeholders. Remembers the matrices that were requested.
    """

    def __init__(self, index: TensorIndex, prefix: str) -> None:
        self.path = index.path
        self._index = index
        self._prefix = prefix
        self._asked: list[tuple[str, int]] = []

    def __iter__(self) -> Iterator[str]:
        """Return no names, so that no tensor counts as unused."""
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if not name.startswith(_FIRST):
            return torch.ones(shape)
        stored = self._prefix + name.removeprefix(_FIRST)
        if len(shape) > 1:
            self._asked.append((stored, shape[0]))
        return self._index.load(stored, shape)

    def taken(self, num_outputs: int) -> list[tuple[str, int]]:
        """Pop the last requested matrices that have ``num_outputs`` outputs together."""
        taken: list[tuple[str, int]] = []
        while num_outputs > 0:
            taken.insert(0, self._asked.pop())
            num_outputs -= taken[0][1]
        return taken


class CalibratedLayers:
    """Layers of a checkpoint, quantized in order by the outputs of quantized earlier layers.

    ``prefix`` is common to the names of all tensors. ``texts`` are token ids, cut to
    ``MAX_TEXT_TOKENS``. Holds one hidden state per token, and one layer in float32.
    """

    def __init__(
        self,
        index: TensorIndex,
        config: ModelConfig,
        prefix: str,
        texts: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._index = index
        self._config = config
        self._prefix = prefix
        self._device = device
        self._batches = list(_batches(texts, device))
        shape = (config.vocab_size, config.hidden_size)
        embedding = index.load(f"{prefix}embed_tokens.weight", shape)
        self._hidden = [
            embedding.index_select(0, batch.token_ids.cpu()).float() for batch in self._batches
        ]

    @torch.inference_mode()
    def quantized(
        self, number: int, *, group_inputs: int, scale_dtype: torch.dtype
    ) -> dict[str, QuantizedWeight]:
        """Return the weights of layer ``number`` by tensor name; call this for the layers in order.

        Raises CheckpointError, with the tensor's name, if inputs of a layer are not finite.
        """
        tensors = _LayerTensors(self._index, f"{self._prefix}layers.{number}.")
        linears: list[_RecordedLinear] = []

        def record(weight: torch.Tensor, bias: torch.Tensor | None) -> _RecordedLinear:
            linears.append(_RecordedLinear(weight, bias, tensors.taken(len(weight))))
            return linears[-1]

        config = _one_layer(self._config, number)
        weights = load_weights(
            self._index.path,
            config,
            dtype=torch.float32,
            device=self._device,
            source=tensors,
            product=record,
        )
        run = partial(self._run, config, weights)
        run()
        made: dict[str, QuantizedWeight] = {}
        for linear in linears:
            hessian, linear.hessian = linear.hessian, None
            assert hessian is not None, "each map is quantized once"
            if not torch.isfinite(hessian).all():
                raise CheckpointError(
                    f"{self._index.path}: the inputs of {linear.names[0][0]} are not finite for "
                    "the texts of the calibration."
                )
            whole = gptq_int4(
                linear.weight,
                hessian,
                group_inputs=group_inputs,
                scale_dtype=scale_dtype,
            )
            linear.weight = whole.values()
            made |= _parts(whole, linear.names)
        if number < self._config.num_hidden_layers - 1:
            self._hidden = run()
        return made

    def _run(self, config: ModelConfig, weights: DecoderWeights) -> list[torch.Tensor]:
        """Compute the hidden states after the layer."""
        operations = _operations(config, self._batches, self._device)
        results = []
        for batch, hidden in zip(self._batches, self._hidden, strict=True):
            # Each row of the batch is a token whose embedding is its hidden state.
            rows = torch.arange(len(hidden), device=self._device)
            decoder: Decoder[FlatBatch, TorchMetadata] = Decoder(
                config, weights._replace(embedding=hidden.to(self._device)), operations
            )
            results.append(decoder.forward(batch._replace(token_ids=rows)).cpu())
        return results


def _one_layer(config: ModelConfig, number: int) -> ModelConfig:
    """Return the config of a model of layer ``number`` alone, without a head."""
    experts = config.experts
    if experts is not None:
        is_mixture = number in experts.layers
        experts = msgspec.structs.replace(experts, layers=(0,)) if is_mixture else None
    return msgspec.structs.replace(
        config,
        num_hidden_layers=1,
        sliding_layers=(0,) if number in config.sliding_layers else (),
        experts=experts,
        vocab_size=1,
        has_head=False,
        classifier=None,
    )


def _operations(
    config: ModelConfig, batches: Sequence[FlatBatch], device: torch.device
) -> TorchOperations:
    num_blocks = max(batch.ranges[-1].block_table[-1] + 1 for batch in batches)
    cache = KVCache(
        config,
        num_blocks=num_blocks,
        block_size_tokens=_BLOCK_TOKENS,
        dtype=torch.float32,
        device=device,
    )
    attention = TorchAttention(
        cache, num_heads=config.num_attention_heads, dtype=torch.float32, windows=config.windows
    )
    return TorchOperations(attention, epsilon=config.rms_norm_eps)


def _batches(texts: Sequence[Sequence[int]], device: torch.device) -> Iterator[FlatBatch]:
    waiting: list[Sequence[int]] = []
    num_tokens = 0
    for text in texts:
        cut = text[:MAX_TEXT_TOKENS]
        if waiting and num_tokens + len(cut) > _BATCH_TOKENS:
            yield _batch(waiting, device)
            waiting, num_tokens = [], 0
        waiting.append(cut)
        num_tokens += len(cut)
    if waiting:
        yield _batch(waiting, device)


def _batch(texts: Sequence[Sequence[int]], device: torch.device) -> FlatBatch:
    """Build a step in which each text is a prompt."""
    ranges: list[QueryRange] = []
    start = block = 0
    for text in texts:
        num_blocks = -(-len(text) // _BLOCK_TOKENS)
        ranges.append(QueryRange(start, len(text), 0, range(block, block + num_blocks)))
        start += len(text)
        block += num_blocks
    return FlatBatch(
        token_ids=torch.tensor([token for text in texts for token in text], device=device),
        positions=torch.cat([torch.arange(len(text), device=device) for text in texts]),
        ranges=ranges,
        num_single=0,
        sampled_rows=torch.empty(0, dtype=torch.int64, device=device),
        sampled=[],
        pooled=[],
        scored=[],
    )


def _parts(whole: QuantizedWeight, names: list[tuple[str, int]]) -> dict[str, QuantizedWeight]:
    """Cut ``whole`` into the outputs of the named tensors, which follow each other."""
    sizes = [size for _, size in names]
    codes, scales = torch.split(whole.codes, sizes), torch.split(whole.scales, sizes)
    return {
        name: replace(whole, codes=own, scales=scale)
        for (name, _), own, scale in zip(names, codes, scales, strict=True)
    }
