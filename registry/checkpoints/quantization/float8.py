"""Checkpoints whose ``quant_method`` is fp8: e4m3 with a scale a tensor, an output or a block.

The layout is that of DeepSeek-V3's and Qwen3's own checkpoints: ``weight_scale_inv`` holds, despite
its name, what codes are multiplied by.
"""

from __future__ import annotations

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.checkpoints.quantization.scheme import (
    InputRounding,
    Layout,
    QuantizationConfig,
    Rule,
    Scheme,
)
from millrace.registry.checkpoints.quantization.targets import read_modules


def read_float8(fields: JsonFields) -> QuantizationConfig:
    """Raises CheckpointError naming the field that is not as supported."""
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
    # A scale a token, not one of the whole batch: an answer must not depend on its company.
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
