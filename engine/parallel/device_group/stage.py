"""One stage of a pipeline, as the steps of its ranks are computed."""

from __future__ import annotations

import torch

from millrace.engine.devices.cuda.steps import DeviceDecoder, StepParts
from millrace.engine.kernels.gpu.device_batch import DeviceBatch
from millrace.engine.models.shard import Shard
from millrace.engine.parallel.device_group.links import StageLinks


class PipelineStage:
    """See ``Stage``. Hidden states come, are computed with and go in the same place."""

    def __init__(self, parts: StepParts, shard: Shard, links: StageLinks) -> None:
        self.is_last = shard.is_last
        self._is_first = shard.is_first
        self._links = links
        self._hidden = torch.zeros(
            parts.bounds.num_tokens,
            parts.config.hidden_size,
            dtype=parts.decoder.dtype,
            device=parts.device.torch_device,
        )

    def receive(self, num_tokens: int) -> None:
        self._links.receive_hidden(self._hidden[:num_tokens])

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        if self._is_first:
            return decoder.forward(batch)
        return decoder.forward_hidden(batch, self._hidden[: len(batch.token_ids)])

    def leave(self, states: torch.Tensor) -> None:
        self._hidden[: len(states)].copy_(states)

    def send(self, num_tokens: int) -> None:
        self._links.send_hidden(self._hidden[:num_tokens])
