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


class Experts(Enum):
    """How a family's ``config.json`` and tensors name its mixtures of experts."""

    NONE = auto()
    MIXTRAL = auto()
    QWEN = auto()


class Family(NamedTuple):
    """What a family's ``config.json`` leaves unsaid.

    ``head_dim`` None: hidden_size / num_attention_heads. The numbers are those of a file that does
    not name them.
    """

    biases: Biases = Biases.AS_CONFIGURED
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    windows: Windows = Windows.NONE
    sliding_window: int | None = None
    experts: Experts = Experts.NONE
    num_experts: int = 0
    num_chosen_experts: int = 0
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
    "Mixtral": Family(
        biases=Biases.NONE,
        windows=Windows.ALL_LAYERS,
        experts=Experts.MIXTRAL,
        num_experts=8,
        num_chosen_experts=2,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    ),
    "Qwen3Moe": Family(
        qk_norm=True,
        windows=Windows.SWITCHED_ALL_LAYERS,
        sliding_window=_QWEN_WINDOW,
        experts=Experts.QWEN,
        num_experts=128,
        num_chosen_experts=8,
    ),
}

_GENERATES = "ForCausalLM"
_EMBEDS = "Model"
_CLASSIFIES = "ForSequenceClassification"
SUPPORTED_ARCHITECTURES = tuple(family + _GENERATES for family in FAMILIES)
EMBEDDING_ARCHITECTURES = tuple(family + _EMBEDS for family in FAMILIES)
CLASSIFIER_ARCHITECTURES = tuple(family + _CLASSIFIES for family in FAMILIES)


def family_of(architecture: str) -> Family | None:
    """The family of a class name, with any head or none; None if unknown."""
    for ending in (_GENERATES, _EMBEDS, _CLASSIFIES):
        if architecture.endswith(ending):
            return FAMILIES.get(architecture.removesuffix(ending))
    return None
