"""EAGLE-3 head: its layer, computed in one call, and the runner of its plans."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.operations import CpuOperations, suits
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.eagle_head import EagleHeadWeights, load_eagle_head
from millrace.engine.models.linears import PackedProjection, packed_quantized
from millrace.engine.models.weight_reader import Makers
from millrace.engine.sampling.sampler import Likeliest
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.engine.step.features import HeadInputs
from millrace.engine.step.runner import DraftRunner, InFlightStep, nothing_chosen
from millrace.engine.step.sequence import Sequence
from millrace.registry.checkpoints.eagle_head import EagleHeadConfig, read_eagle_head
from millrace.schemas.errors import ConfigError


class FusedHead:
    """EAGLE-3 head that computes flat batches of tokens beside the features of the tokens before.

    Its output for a token replaces the token's features where the target has not computed them. Its
    logits are for the next token.
    """

    def __init__(
        self,
        config: EagleHeadConfig,
        weights: EagleHeadWeights,
        operations: CpuOperations,
        kernels: CpuKernels,
    ) -> None:
        self._weights = weights
        self._operations = operations
        self._decoder = FusedDecoder(config, weights.decoder, operations, kernels)
        self._norm_before_residual = config.norm_before_residual
        self._vocab_size = config.vocab_size
        all_ids = torch.arange(config.vocab_size)
        self._knows_all_in_order = torch.equal(weights.target_ids, all_ids)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuse [num_tokens, 3 * target_hidden_size] to float32 [num_tokens, hidden_size]."""
        return self._weights.fusion.unrounded(features)

    def forward(self, batch: FlatBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Compute a batch from the preceding features, float32 ``hidden``.

        ``hidden`` is [num_tokens, hidden_size]. It is overwritten by the output for each token,
        which is returned.
        """
        operations, layer = self._operations, self._weights.decoder.layers[0]
        embedded = self._decoder.embedding.index_select(0, batch.token_ids).float()
        normed = operations.rms_norm(hidden, self._weights.hidden_norm)
        both = torch.cat((operations.rms_norm(embedded, layer.attention_norm), normed), -1)
        total = normed.float() if self._norm_before_residual else hidden
        return self._decoder.forward_from(batch, total, both)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [num_rows, vocab_size] of rows of ``forward``.

        Tokens outside the head's vocabulary have -inf.
        """
        known = self._decoder.logits(hidden)
        if self._knows_all_in_order:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._weights.target_ids, known)


_log = logging.getLogger(__name__)


class _Item(NamedTuple):
    """Item of a plan: ``num_tokens`` of a sequence from its token ``begin`` on."""

    sequence: Sequence
    begin: int
    num_tokens: int
    inputs: HeadInputs


class HeadRunner(DraftRunner):
    """Runner of a head: owns its weights and a KV cache of as many blocks as the target's.

    The sequences of its plans have ``HeadInputs`` as their features.
    """

    def __init__(
        self,
        config: EagleHeadConfig,
        head: FusedHead,
        cache: KVCache,
        likeliest: Likeliest,
    ) -> None:
        self.config = config
        self.cache = cache
        self.likeliest: Likeliest | None = likeliest
        self._head = head

    @classmethod
    def load(cls, path: Path, target: ModelRunner, embedding: torch.Tensor) -> HeadRunner:
        """Load a head for ``target``, whose rows must be exact.

        The target keeps its features for the head from now on. ``embedding`` is the target's whole
        embedding, [vocab_size, hidden_size].

        Raises:
            CheckpointError: The head cannot be read.
            ConfigError: The kernels do not compute a head of this shape.
        """
        config, tensors = read_eagle_head(path, target.config)
        device = target.host_device
        if not suits(config, embedding.dtype, device):
            raise ConfigError(
                f"engine.speculation: the compiled kernels do not support the head {path}, with "
                f"heads of {config.head_dim} in layers of {config.hidden_size} and "
                f"{config.intermediate_size}. Remove it from the setting."
            )
        kernels = CpuKernels(cpu_library(), embedding.dtype)
        makers = Makers(
            partial(PackedProjection.of_wide, kernels),
            partial(packed_quantized, kernels),
            quantize=None,
            experts=None,
        )
        weights = load_eagle_head(tensors, config, embedding, makers)
        cache = KVCache(
            config,
            num_blocks=target.cache.num_blocks,
            block_size_tokens=target.cache.block_size_tokens,
            dtype=embedding.dtype,
            device=device,
        )
        attention = TorchAttention(
            cache,
            num_heads=config.num_attention_heads,
            dtype=embedding.dtype,
            windows=config.windows,
        )
        operations = CpuOperations(attention, kernels, epsilon=config.rms_norm_eps)
        target.keep_features(config.feature_layers)
        _log.info("drafting by the EAGLE-3 head %s from layers %s", path, config.feature_layers)
        return cls(
            config, FusedHead(config, weights, operations, kernels), cache, kernels.likeliest
        )

    @property
    def host_device(self) -> torch.device:
        return self.cache.data.device

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Compute a plan's tokens, and logits of the sequences that are now complete.

        Features that were used are dropped, except those of the last token.
        """
        with torch.inference_mode():
            items = [
                _Item(sequence, sequence.num_computed_tokens, num_tokens, sequence.features)
                for sequence, num_tokens in plan
            ]
            # Attention takes single-token rows first, by rising length.
            items.sort(key=lambda item: (item.num_tokens > 1, item.begin - item.inputs.start))
            batch = _batch(items)
            hidden = self._head.forward(batch, self._inputs(items))
            last = hidden.index_select(0, batch.sampled_rows)
            logits = self._head.logits(last)
            for item in items:
                if item.inputs.own is None:
                    item.inputs.features.drop_before(item.begin + item.num_tokens - 2)
            for sequence, own in zip(batch.sampled, last, strict=True):
                sequence.features = sequence.features._replace(own=own)
            return InFlightStep([], batch.sampled, logits, [], [], nothing_chosen)

    def _inputs(self, items: list[_Item]) -> torch.Tensor:
        """Return the features beside each token: the target's for all items, or the head's for all.

        Sequences that are drafted for advance together, so the two kinds never mix.
        """
        own = [item.inputs.own for item in items if item.inputs.own is not None]
        if own:
            return torch.stack(own)
        rows = [
            item.inputs.features.rows(item.begin - 1, item.begin - 1 + item.num_tokens)
            for item in items
        ]
        return self._head.fuse(torch.cat(rows))


def _batch(items: list[_Item]) -> FlatBatch:
    """Lay out a batch with the head's own positions and blocks.

    Its positions begin with the first token that has features, its keys and values with the block
    of that token's features.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[QueryRange] = []
    sampled: list[Sequence] = []
    sampled_rows: list[int] = []
    for sequence, begin, num_tokens, inputs in items:
        context = begin - inputs.start
        ranges.append(QueryRange(len(token_ids), num_tokens, context, sequence.block_table))
        token_ids += sequence.token_ids[begin : begin + num_tokens]
        positions += range(context, context + num_tokens)
        if begin + num_tokens == len(sequence.token_ids):
            sampled.append(sequence)
            sampled_rows.append(len(token_ids) - 1)
    return FlatBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        ranges=ranges,
        num_single=sum(item.num_tokens == 1 for item in items),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64),
        sampled=sampled,
        pooled=[],
        scored=[],
    )
