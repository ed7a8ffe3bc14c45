"""Model families that the decoder supports, and their differences."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields


class Biases(Enum):
    """Biases of the attention's projections."""

    NONE = auto()
    QKV = auto()
    AS_CONFIGURED = auto()  # q, k, v and o, if attention_bias says so


class Windows(Enum):
    """Source of a family's sliding window, and the layers that have it."""

    NONE = auto()
    ALL_LAYERS = auto()  # sliding_window, in every layer
    SWITCHED_ALL_LAYERS = auto()  # the same, if use_sliding_window says so
    SWITCHED_BY_LAYER = auto()  # and only in the layers of layer_types or max_window_layers


class Experts(Enum):
    """Naming of mixtures of experts in a family's ``config.json`` and tensors."""

    NONE = auto()
    MIXTRAL = auto()
    QWEN = auto()


class Family(NamedTuple):
    """Defaults of a family for fields that ``config.json`` does not have.

    ``head_dim`` None: hidden_size / num_attention_heads.
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
    """Return the family of a class name, with any head or none; None if unknown."""
    for ending in (_GENERATES, _EMBEDS, _CLASSIFIES):
        if architecture.endswith(ending):
            return FAMILIES.get(architecture.removesuffix(ending))
    return None


_SLIDING = "sliding_attention"
_FULL = "full_attention"
_MAX_WINDOW_LAYERS = 28  # default of Qwen


def read_windows(
    fields: JsonFields, family: Family, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """Return (window in tokens, the layers that have it); (None, ()) if no layer has a window.

    Raises:
        CheckpointError: the family does not support the window; names the field.
    """
    window = _window(fields, family)
    if window is None:
        layers: tuple[int, ...] = ()
    elif family.windows is Windows.SWITCHED_BY_LAYER:
        first = fields.get("max_window_layers")
        if first != 0:  # 0 is valid here, and not a positive integer
            first = fields.positive_int("max_window_layers", _MAX_WINDOW_LAYERS)
        layers = tuple(range(first, num_layers))
    else:
        layers = tuple(range(num_layers))
    kinds = fields.get("layer_types")
    if kinds is not None:
        layers = _listed_layers(fields, family, layers, window, num_layers)
    return (window, layers) if layers else (None, ())


def _window(fields: JsonFields, family: Family) -> int | None:
    switched = family.windows in (Windows.SWITCHED_ALL_LAYERS, Windows.SWITCHED_BY_LAYER)
    if switched and not fields.boolean("use_sliding_window", default=False):
        return None
    if family.windows is Windows.NONE:
        if fields.boolean("use_sliding_window", default=False):
            raise fields.bad("use_sliding_window", "false: this architecture has no windows")
        return None
    if family.sliding_window is None and fields.get("sliding_window") is None:
        return None
    if fields.is_null("sliding_window"):
        return None
    return fields.positive_int("sliding_window", family.sliding_window)


def _listed_layers(
    fields: JsonFields,
    family: Family,
    implied: tuple[int, ...],
    window: int | None,
    num_layers: int,
) -> tuple[int, ...]:
    kinds = fields.get("layer_types")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (_SLIDING, _FULL) for kind in kinds)
    ):
        raise fields.bad("layer_types", f"{num_layers} of {_FULL} and {_SLIDING}, one a layer")
    listed = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    if listed and window is None:
        raise fields.bad("layer_types", f"{_FULL} in every layer, as there is no sliding window")
    if family.windows is not Windows.SWITCHED_BY_LAYER and listed != implied:
        raise fields.bad("layer_types", "the same in every layer for this architecture")
    return listed


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts in ``layers`` (ascending).

    ``num_chosen`` of ``num_experts`` MLPs of ``intermediate_size`` compute each token. Their
    weights are softmax probabilities over all experts, divided by their sum if ``normalized``.
    """

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalized: bool


def read_experts(fields: JsonFields, family: Family, num_layers: int) -> ExpertsConfig | None:
    """Return the experts in ``config.json``; None if no layer has experts.

    Raises:
        CheckpointError: a number is impossible; names the field.
    """
    if family.experts is Experts.NONE:
        return None
    by_qwen = family.experts is Experts.QWEN
    layers = _qwen_layers(fields, num_layers) if by_qwen else tuple(range(num_layers))
    if not layers:
        return None
    name = "num_experts" if by_qwen and fields.get("num_experts") is not None else None
    num_experts = fields.positive_int(name or "num_local_experts", family.num_experts)
    num_chosen = fields.positive_int("num_experts_per_tok", family.num_chosen_experts)
    if num_chosen > num_experts:
        raise fields.bad("num_experts_per_tok", f"at most the number of experts ({num_experts})")
    return ExpertsConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=fields.positive_int(
            "moe_intermediate_size" if by_qwen else "intermediate_size"
        ),
        normalized=fields.boolean("norm_topk_prob", default=False) if by_qwen else True,
    )


def _qwen_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    """Return every ``decoder_sparse_step``-th layer except those in ``mlp_only_layers``."""
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.bad("mlp_only_layers", "a list of layer numbers")
    sparse = range(step - 1, num_layers, step)
    return tuple(layer for layer in sparse if layer not in dense)
