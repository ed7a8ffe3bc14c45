"""An EAGLE-3 head whose layer is computed in one call."""

from __future__ import annotations

import torch

from millrace.engine.devices.cpu.cpu_operations import CpuOperations
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.models.eagle_head import EagleHeadWeights
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.eagle_head import EagleHeadConfig


class FusedHead:
    """Computes flat batches in which a token stands beside the features of the token before it.

    What comes out for a token is what the head takes for its features where the target has not
    computed it; its logits are for the token behind it.
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
        """[num_tokens, 3 * target_hidden_size] to [num_tokens, hidden_size]."""
        return self._weights.fusion(features)

    def forward(self, batch: FlatBatch, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [num_tokens, hidden_size], of the token before each, is overwritten; returns
        what comes out for it."""
        operations, layer = self._operations, self._weights.decoder.layers[0]
        embedded = self._decoder.embedding.index_select(0, batch.token_ids)
        normed = operations.rms_norm(hidden, self._weights.hidden_norm)
        both = torch.cat((operations.rms_norm(embedded, layer.attention_norm), normed), -1)
        total = normed if self._norm_before_residual else hidden
        return self._decoder.forward_from(batch, total, both)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of rows of ``forward``; -inf for tokens the head does not know."""
        known = self._decoder.logits(hidden)
        if self._knows_all_in_order:
            return known
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._weights.target_ids, known)
