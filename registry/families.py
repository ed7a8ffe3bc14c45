"""The model families that the decoder computes, and in what they differ."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Biases(Enum):
    """Which of the attention's projections have a bias."""

    NONE = auto()
    QKV = auto()
    AS_CONFIGURED = auto()  # q, k, v and o, if attention_bias says so


class Windows(Enum):
    """Where a family's sliding window comes from, and which layers have it."""

    NONE = auto()
    ALL_LAYERS = auto()  # sliding_window, in every layer
    SWITCHED_ALL_LAYERS = auto()  # the same, if use_sliding_window says so
    SWITCHED_BY_LAYER = auto()  # and only in the layers of layer_types or max_window_layers


class Family(NamedTuple):
    """What a family's ``config.json`` leaves unsaid.

    ``head_dim`` None: hidden_size / num_attention_heads. ``sliding_window`` is that of a file
    that does not name it.
    """

    biases: Biases = Biases.AS_CONFIGURED
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: Windows = Windows.NONE
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


_QWEN_WINDOW = 4096

FAMILIES = {
    "Llama": Family(mlp_bias=True),
    "Qwen2": Family(
        biases=Biases.QKV,
        windows=Windows.SWITCHED_BY_LAYER,
        sliding_window=_QWEN_WINDOW,
    ),
    "Qwen3": Family(
        qk_norm=True,
        head_dim=128,
        windows=Windows.SWITCHED_BY_LAYER,
        sliding_window=_QWEN_WINDOW,
    ),
    "Mistral": Family(
        biases=Biases.NONE,
        windows=Windows.ALL_LAYERS,
        sliding_window=4096,
    ),
}
