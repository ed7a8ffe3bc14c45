"""Checkpoints with ``quant_method`` awq or gptq (integers packed into int32), or fp8."""

from __future__ import annotations

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.checkpoints.quantization.scheme import (
    InputRounding,
    Layout,
    QuantizationConfig,
    Rule,
    Scheme,
    is_pattern,
    pattern,
    read_modules,
)


def read_float8(fields: JsonFields) -> QuantizationConfig:
    """Read an fp8 config. Raises CheckpointError naming the unsupported field."""
    if fields.string("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise fields.bad("fmt", "e4m3")
    if fields.string("scale_fmt", "float") != "float":
        raise fields.bad("scale_fmt", "float")
    if fields.string("expert_dtype", "fp8") != "fp8":
        raise fields.bad("expert_dtype", "fp8")
    activations = fields.string("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise fields.bad("activation_scheme", "dynamic or static")
    is_static = activations == "static"
    # A scale per token, not per batch: an answer must not depend on the other requests
    # (batch-invariant).
    inputs = InputRounding.FLOAT8_TENSOR if is_static else InputRounding.FLOAT8_TOKEN
    block_outputs, group_inputs = 1, None
    if fields.get("weight_block_size") is not None:
        block_outputs, group_inputs = fields.positive_pair("weight_block_size")
        if is_static:
            raise fields.bad("activation_scheme", "dynamic with a weight_block_size")
        inputs = InputRounding.FLOAT8_GROUP
    scheme = Scheme(
        layout=Layout.PLAIN,
        is_float=True,
        group_inputs=group_inputs,
        block_outputs=block_outputs,
        inputs=inputs,
    )
    targets = ("Linear", *read_modules(fields, "modules_to_convert"))
    return QuantizationConfig(
        method="fp8",
        rules=(Rule(targets=targets, scheme=scheme),),
        ignored=read_modules(fields, "modules_to_not_convert", "ignored_layers"),
    )


_ALL_INPUTS = -1
_AWQ_BITS, _GPTQ_BITS = (4,), (4, 8)
_LEAVE_WIDE, _CHANGE = "-:", "+:"
# Fields that an override of a module may change; the tensors themselves show the last two.
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")
_HEAD = pattern("lm_head$")


def read_awq(fields: JsonFields) -> QuantizationConfig:
    """Read an AWQ config. Raises CheckpointError naming the unsupported field."""
    version = "version" if fields.get("version") is not None else "format"
    if fields.string(version, "gemm").lower() != "gemm":
        raise fields.bad(version, "gemm")
    if not fields.boolean("zero_point", default=True):
        raise fields.bad("zero_point", "true")
    scheme = Scheme(
        layout=Layout.AWQ,
        bits=_bits(fields, "bits" if fields.get("w_bit") is None else "w_bit", _AWQ_BITS),
        group_inputs=_group_inputs(
            fields, "group_size" if fields.get("q_group_size") is None else "q_group_size", 128
        ),
        has_zeros=True,
    )
    return QuantizationConfig(
        method="awq",
        rules=(Rule(targets=("Linear",), scheme=scheme),),
        ignored=(_HEAD, *read_modules(fields, "modules_to_not_convert")),
    )


def read_gptq(fields: JsonFields) -> QuantizationConfig:
    """Read a GPTQ config.

    ``dynamic`` is GPTQModel's: patterns after ``-:`` leave modules unquantized, others change their
    quantization.

    Raises:
        CheckpointError: names the unsupported field.
    """
    name = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    layouts = {"gptq": Layout.GPTQ, "gptq_v2": Layout.GPTQ_V2}
    stored = fields.string(name, "gptq")
    if stored not in layouts:
        raise fields.bad(name, "gptq or gptq_v2")
    # The tensors show unusual orders and zero points, and they are read anyway.
    fields.boolean("sym", default=True)
    fields.boolean("desc_act", default=False)
    scheme = Scheme(
        layout=layouts[stored],
        bits=_bits(fields, "bits", _GPTQ_BITS),
        group_inputs=_group_inputs(fields, "group_size", None),
        has_zeros=True,
    )
    wide, changes = _read_dynamic(fields, scheme)
    ignored = (*wide, *read_modules(fields, "modules_to_not_convert"))
    if not fields.boolean("lm_head", default=False):
        ignored = (_HEAD, *ignored)
    return QuantizationConfig(
        method="gptq",
        rules=(*changes, Rule(targets=("Linear",), scheme=scheme)),
        ignored=ignored,
    )


def _read_dynamic(fields: JsonFields, scheme: Scheme) -> tuple[list[str], list[Rule]]:
    """Return the targets that stay unquantized, and the rules that differ from ``scheme``."""
    wide, changes = [], []
    dynamic = fields.inside("dynamic")
    for key in fields.mapping("dynamic") or {}:
        expression = key.removeprefix(_LEAVE_WIDE).removeprefix(_CHANGE)
        if not is_pattern(expression):
            raise fields.bad("dynamic", f"an object of regular expressions ({key} is not)")
        if key.startswith(_LEAVE_WIDE):
            wide.append(pattern(expression))
            continue
        unknown = [name for name in dynamic.mapping(key) or {} if name not in _OVERRIDES]
        if unknown:
            raise dynamic.bad(key, f"an object of {', '.join(_OVERRIDES)}")
        change = dynamic.inside(key)
        own = msgspec.structs.replace(
            scheme,
            bits=scheme.bits if change.get("bits") is None else _bits(change, "bits", _GPTQ_BITS),
            group_inputs=scheme.group_inputs
            if change.get("group_size") is None
            else _group_inputs(change, "group_size", None),
        )
        changes.append(Rule(targets=(pattern(expression),), scheme=own))
    return wide, changes


def _bits(fields: JsonFields, name: str, supported: tuple[int, ...]) -> int:
    bits = fields.positive_int(name)
    if bits not in supported:
        raise fields.bad(name, " or ".join(str(number) for number in supported))
    return bits


def _group_inputs(fields: JsonFields, name: str, default: int | None) -> int | None:
    if fields.get(name) == _ALL_INPUTS:
        return None
    return fields.positive_int(name, default)
