"""Which of a model's layers steps are computed with, and where their hidden states come from."""

from __future__ import annotations

from typing import Protocol

import torch

from millrace.engine.devices.cuda.operations import DeviceMetadata
from millrace.engine.kernels.gpu.device_batch import DeviceBatch
from millrace.engine.models.decoder import Decoder

DeviceDecoder = Decoder[DeviceBatch, DeviceMetadata]


class Stage(Protocol):
    """All layers, or some: hidden states come from the stage before and go to the one behind.

    ``receive`` and ``send`` are outside of what is recorded, ``forward`` and ``leave`` within it.
    """

    is_last: bool

    def receive(self, num_tokens: int) -> None:
        """Bring what the stage before has made of so many rows."""

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        """What the layers make of a step: [num_tokens, hidden_size]."""

    def leave(self, states: torch.Tensor) -> None:
        """Have them stay where ``send`` finds them; of a stage that is not the last."""

    def send(self, num_tokens: int) -> None:
        """Give so many rows to the stage behind."""


class AllLayers:
    """The only stage."""

    is_last = True

    def receive(self, num_tokens: int) -> None:
        """The decoder embeds them."""

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        return decoder.forward(batch)

    def leave(self, states: torch.Tensor) -> None:
        """Nobody computes on."""

    def send(self, num_tokens: int) -> None:
        """See ``leave``."""


ALL_LAYERS = AllLayers()
