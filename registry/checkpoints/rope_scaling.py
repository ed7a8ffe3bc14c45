"""Rotary position embedding of a checkpoint, checked before weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millrace.registry.checkpoints.json_fields import JsonFields

SUPPORTED_ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
# Kind that GGUF files have: a divisor for each pair's frequency.
_FACTORS = "factors"
_ORIGINAL = "original_max_position_embeddings"


def read_rope(
    fields: JsonFields, default_theta: float, max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) from either layout.

    Newer files hold both in ``rope_parameters``; older ones have ``rope_theta`` and
    ``rope_scaling``. If a file has both objects, only ``rope_scaling`` counts, as in transformers.
    The scaling is None for plain RoPE; otherwise it has the kind under ``rope_type`` and the kind's
    parameters under their own names.

    Raises:
        CheckpointError: the kind is not supported, or a parameter is missing or impossible; names
            the field.
    """
    newer = JsonFields(fields.path, fields.mapping("rope_parameters") or {})
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    inner = JsonFields(fields.path, fields.mapping(name) or {})
    for place in (fields, inner):
        if place.positive_float("partial_rotary_factor", 1.0) != 1.0:
            raise place.bad("partial_rotary_factor", "1: partial RoPE is not supported")
    if any(isinstance(value, dict) for value in (fields.mapping(name) or {}).values()):
        raise fields.bad(name, "the same for all layers")
    theta = inner.positive_float("rope_theta", fields.positive_float("rope_theta", default_theta))
    if newer.positive_float("rope_theta", theta) != theta:
        # In a file edited by hand it is unknown which of them is meant.
        raise newer.bad("rope_theta", f"as in rope_scaling, which takes precedence: {theta:g}")
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == _FACTORS:
        return theta, {"rope_type": kind, "factors": _factors(inner)}
    if kind not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise fields.bad(name, f"an object with a rope_type of default, {supported}")
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind in ("yarn", "llama3"):
        scaling[_ORIGINAL] = fields.positive_int(
            _ORIGINAL, inner.positive_int(_ORIGINAL, max_position_embeddings)
        )
    if kind == "yarn":
        scaling |= _yarn(inner, max_position_embeddings / scaling[_ORIGINAL])
    else:
        scaling["factor"] = inner.positive_float("factor")
    if kind == "llama3":
        low = scaling["low_freq_factor"] = inner.positive_float("low_freq_factor")
        high = scaling["high_freq_factor"] = inner.positive_float("high_freq_factor")
        if high <= low:
            raise inner.bad("high_freq_factor", f"above low_freq_factor ({low:g})")
    return theta, scaling


def _factors(inner: JsonFields) -> tuple[float, ...]:
    factors = inner.get(_FACTORS)
    is_list = isinstance(factors, list) and all(isinstance(x, int | float) for x in factors)
    if not is_list or not all(math.isfinite(x) and x > 0 for x in factors):
        raise inner.bad(_FACTORS, "a list of positive numbers, one for each pair of a head")
    return tuple(float(factor) for factor in factors)


def _yarn(inner: JsonFields, default_factor: float) -> dict[str, Any]:
    """Return YaRN's parameters, with the factor for sines and cosines computed."""
    # Null asks for the ratio of the windows; a file without the field is damaged.
    default = default_factor if inner.is_null("factor") else None
    factor = inner.positive_float("factor", default)
    own, all_dims = (inner.number(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    if own and all_dims:
        attention_factor = _mscale(factor, own) / _mscale(factor, all_dims)
    else:
        attention_factor = _mscale(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": inner.positive_float("attention_factor", attention_factor),
        "beta_fast": inner.positive_float("beta_fast", 32.0),
        "beta_slow": inner.positive_float("beta_slow", 1.0),
        "truncate": inner.boolean("truncate", default=True),
    }


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def extended_window(max_position_embeddings: int, scaling: Mapping[str, Any] | None) -> int:
    """Return the number of tokens that a model supports with its scaling.

    Files with llama3 scaling or factors have the longer window in ``max_position_embeddings``;
    files with YaRN may or may not.
    """
    if scaling is None or scaling["rope_type"] in ("llama3", _FACTORS):
        return max_position_embeddings
    trained = scaling[_ORIGINAL] if scaling["rope_type"] == "yarn" else max_position_embeddings
    factor: float = scaling["factor"]
    return max(max_position_embeddings, math.floor(factor * trained))
