"""Schemes of quantization, and their description in a checkpoint's ``config.json``.

The terms are those of compressed-tensors: https://github.com/vllm-project/compressed-tensors,
``QuantizationConfig``, ``QuantizationScheme`` and ``QuantizationArgs``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

# Modules that are quantized, by the last part of their names.
LINEAR_NAMES = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("w1", "w2", "w3"),
    }
)
# Routers of experts, which stay wide, by each model family's name.
ROUTERS = (r"re:.*\.mlp\.gate$", r"re:.*\.block_sparse_moe\.gate$")


class QuantizerScheme(StrEnum):
    """Scheme by the bits of weights (w) and activations (a)."""

    W8A8_INT8 = "w8a8-int8"
    W8A8_FP8 = "w8a8-fp8"
    W4A16 = "w4a16"


_FORMATS = {
    QuantizerScheme.W8A8_INT8: "int-quantized",
    QuantizerScheme.W8A8_FP8: "float-quantized",
    QuantizerScheme.W4A16: "pack-quantized",
}


def quantization_config(
    scheme: QuantizerScheme, groups: Mapping[str, int | None], ignored: Sequence[str]
) -> dict[str, Any]:
    """Return the field ``quantization_config``.

    ``groups`` maps the names of quantized modules to the number of inputs that share a scale, None
    for all. ``ignored`` are linear maps that stay wide.
    """
    targets: dict[int | None, list[str]] = {}
    for pattern, size in {_pattern(name): size for name, size in groups.items()}.items():
        targets.setdefault(size, []).append(pattern)
    kind, is_wide = _FORMATS[scheme], scheme is QuantizerScheme.W4A16
    bits = 4 if is_wide else 8
    inputs = None if is_wide else _arguments(scheme, 8, "token", size=None, dynamic=True)
    config_groups = {
        f"group_{number}": {
            # Groups of several sizes are told apart by names; a single group covers all linear
            # maps.
            "targets": ["Linear"] if len(targets) == 1 else sorted(patterns),
            "weights": _arguments(
                scheme, bits, "group" if size else "channel", size=size, dynamic=False
            ),
            "input_activations": inputs,
            "output_activations": None,
            "format": kind,
        }
        for number, (size, patterns) in enumerate(targets.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _pattern(name: str) -> str:
    """Return a pattern for such modules in all layers and of all experts."""
    layers = name[name.index("layers.") :]
    return "re:.*" + re.sub(r"\d+(?=\\\.)", r"\\d+", re.escape(layers)) + "$"


def _arguments(
    scheme: QuantizerScheme, bits: int, strategy: str, *, size: int | None, dynamic: bool
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float" if scheme is QuantizerScheme.W8A8_FP8 else "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": size,
        "dynamic": dynamic,
    }
