"""What a checkpoint says about its rotary position embedding, checked before weights are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millrace.registry.checkpoints.json_fields import JsonFields

SUPPORTED_ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")
_ORIGINAL = "original_max_position_embeddings"


def read_rope(
    fields: JsonFields, default_theta: float, max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from either layout: ``rope_parameters`` holds both in newer files,
    ``rope_theta`` and ``rope_scaling`` stand apart in older ones. Where a file has both objects,
    ``rope_scaling`` counts alone, as in transformers.

    The scaling is None for plain RoPE, else the kind under ``rope_type`` and the parameters that it
    takes, each under its own name. Raises CheckpointError naming the field for a kind that is not
    computed or a parameter that is missing or cannot be.
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
        # Which of them a file means that was edited by hand cannot be known.
        raise newer.bad("rope_theta", f"as beside rope_scaling, which it gives way to: {theta:g}")
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if kind == "default":
        return theta, None
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


def _yarn(inner: JsonFields, default_factor: float) -> dict[str, Any]:
    """YaRN's parameters; what is multiplied onto sines and cosines is worked out here."""
    # Null asks for the ratio of the windows; a file that does not name it is damaged.
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
    """How many tokens a model is for, when scaling takes it past ``max_position_embeddings``.

    Files with llama3 scaling name the longer window there; files with YaRN do or do not.
    """
    if scaling is None or scaling["rope_type"] == "llama3":
        return max_position_embeddings
    trained = scaling[_ORIGINAL] if scaling["rope_type"] == "yarn" else max_position_embeddings
    factor: float = scaling["factor"]
    return max(max_position_embeddings, math.floor(factor * trained))
