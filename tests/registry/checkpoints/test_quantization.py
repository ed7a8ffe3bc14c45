"""Scheme of each module by ``quantization_config``, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.checkpoints.quantization.reading import read_quantization
from millrace.registry.checkpoints.quantization.scheme import (
    InputRounding,
    Layout,
    QuantizationConfig,
    Rule,
    Scheme,
)
from millrace.registry.checkpoints.side_files import refuse_side_files
from millrace.schemas.errors import CheckpointError

UP = "model.layers.0.mlp.up_proj"
QUERY = "model.layers.10.self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
FLOAT8 = INT8 | {"type": "float"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FLOAT8_TOKEN = TOKEN | {"type": "float"}
BLOCKS = FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}
FLOAT8_GROUP = FLOAT8_TOKEN | {"strategy": "group", "group_size": 128}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(
    weights: dict[str, Any] | None,
    stored: str,
    inputs: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | others


def read(config: dict[str, Any], name: str = "quantization_config") -> QuantizationConfig:
    found = read_quantization(JsonFields(Path("config.json"), {name: config}))
    assert found is not None
    return found


PACKED, PLAIN = Layout.PACKED, Layout.PLAIN
GOOD: list[tuple[dict[str, Any], Scheme]] = [
    (
        compressed(INT4, "pack-quantized"),
        Scheme(layout=PACKED, bits=4, group_inputs=128),
    ),
    (
        compressed(INT4 | {"symmetric": False, "actorder": "weight"}, "pack-quantized"),
        Scheme(layout=PACKED, bits=4, group_inputs=128, has_zeros=True),
    ),
    (
        compressed({"num_bits": 4, "group_size": 32}, "pack-quantized"),
        Scheme(layout=PACKED, bits=4, group_inputs=32),
    ),
    (
        compressed({"num_bits": 8, "group_size": -1}, "pack-quantized"),
        Scheme(layout=PACKED),
    ),
    (compressed({}, "int-quantized"), Scheme(layout=PLAIN)),
    (
        compressed(INT8, "int-quantized", TOKEN),
        Scheme(layout=PLAIN, inputs=InputRounding.INT8_TOKEN),
    ),
    (
        compressed(INT8, "int-quantized", STATIC),
        Scheme(layout=PLAIN, inputs=InputRounding.INT8_TENSOR),
    ),
    (
        compressed(INT8, "int-quantized", STATIC | {"dynamic": True}),
        Scheme(layout=PLAIN, inputs=InputRounding.INT8_TOKEN),
    ),
    (
        compressed(FLOAT8, "float-quantized", FLOAT8_TOKEN),
        Scheme(layout=PLAIN, is_float=True, inputs=InputRounding.FLOAT8_TOKEN),
    ),
    (
        compressed(FLOAT8, "naive-quantized", STATIC | {"type": "float"}),
        Scheme(layout=PLAIN, is_float=True, inputs=InputRounding.FLOAT8_TENSOR),
    ),
    (
        compressed(BLOCKS, "float-quantized", FLOAT8_GROUP),
        Scheme(
            layout=PLAIN,
            is_float=True,
            group_inputs=128,
            block_outputs=128,
            inputs=InputRounding.FLOAT8_GROUP,
        ),
    ),
    (AWQ, Scheme(layout=Layout.AWQ, bits=4, group_inputs=128, has_zeros=True)),
    (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        Scheme(layout=Layout.AWQ, bits=4, group_inputs=64, has_zeros=True),
    ),
    (GPTQ, Scheme(layout=Layout.GPTQ, bits=4, group_inputs=128, has_zeros=True)),
    (
        GPTQ | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        Scheme(layout=Layout.GPTQ_V2, has_zeros=True),
    ),
    (FP8, Scheme(layout=PLAIN, is_float=True, inputs=InputRounding.FLOAT8_TOKEN)),
    (
        FP8 | {"activation_scheme": "static"},
        Scheme(layout=PLAIN, is_float=True, inputs=InputRounding.FLOAT8_TENSOR),
    ),
    (
        FP8 | {"weight_block_size": [64, 128]},
        Scheme(
            layout=PLAIN,
            is_float=True,
            group_inputs=128,
            block_outputs=64,
            inputs=InputRounding.FLOAT8_GROUP,
        ),
    ),
]


@pytest.mark.parametrize(("config", "scheme"), GOOD)
def test_the_scheme_of_a_layer(config: dict[str, Any], scheme: Scheme) -> None:
    assert read(config).scheme_of(UP) == scheme


def test_an_older_name_of_the_field() -> None:
    config = compressed(INT8, "int-quantized", TOKEN)
    assert read(config, "compression_config") == read(config)


def test_no_field_is_no_quantization() -> None:
    assert read_quantization(JsonFields(Path("config.json"), {})) is None


def test_a_format_may_be_that_of_a_group() -> None:
    config = compressed(INT8, "mixed-precision")
    config["config_groups"]["group_0"]["format"] = "int-quantized"
    config["config_groups"]["attention"] = {
        "targets": ["re:.*self_attn.*"],
        "weights": INT4,
        "format": "pack-quantized",
    }
    found = read(config)
    assert found.scheme_of(UP) == Scheme(layout=PLAIN)
    assert found.scheme_of(QUERY) == Scheme(layout=PACKED, bits=4, group_inputs=128)


def test_a_group_without_weights_is_wide() -> None:
    config = compressed(INT8, "int-quantized")
    config["config_groups"]["wide"] = {"targets": [UP], "weights": None}
    found = read(config)
    assert found.scheme_of(UP) is None
    assert found.scheme_of(QUERY) is not None


def test_names_go_before_patterns_and_those_before_classes() -> None:
    schemes = [Scheme(layout=Layout.PLAIN, bits=bits) for bits in (1, 2, 3)]
    config = QuantizationConfig(
        method="compressed-tensors",
        rules=(
            Rule(targets=("Linear",), scheme=schemes[0]),
            Rule(targets=(r"re:.*\.mlp\.",), scheme=schemes[1]),
            Rule(targets=(UP,), scheme=schemes[2]),
        ),
    )
    assert config.scheme_of(UP) == schemes[2]
    assert config.scheme_of("model.layers.1.mlp.up_proj") == schemes[1]
    assert config.scheme_of(QUERY) == schemes[0]
    assert config.scheme_of("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("config", "module", "is_wide"),
    [
        (compressed(INT8, "int-quantized"), "lm_head", True),
        (compressed(INT8, "int-quantized", ignore=[]), "lm_head", False),
        (compressed(INT8, "int-quantized", ignore=["re:.*up_proj"]), UP, True),
        (compressed(INT8, "int-quantized", ignore=["up_proj"]), UP, False),
        (compressed(INT8, "int-quantized", ignore=["Linear"]), UP, True),
        (AWQ, "lm_head", True),
        (AWQ | {"modules_to_not_convert": ["gate"]}, "model.layers.0.mlp.gate", True),
        (AWQ | {"modules_to_not_convert": ["gate"]}, "model.layers.0.mlp.gate_proj", False),
        (AWQ | {"modules_to_not_convert": ["model.layers.1"]}, QUERY, False),
        (AWQ | {"modules_to_not_convert": ["model.layers.10"]}, QUERY, True),
        (FP8 | {"modules_to_not_convert": ["lm_head"]}, "lm_head", True),
        (FP8 | {"ignored_layers": [UP]}, UP, True),
        (GPTQ, "lm_head", True),
        (GPTQ | {"lm_head": True}, "lm_head", False),
        (GPTQ | {"dynamic": {r"-:.*\.mlp\.": {}}}, UP, True),
        (GPTQ | {"dynamic": {r"-:.*\.mlp\.": {}}}, QUERY, False),
    ],
)
def test_modules_that_stay_wide(config: dict[str, Any], module: str, is_wide: bool) -> None:
    assert (read(config).scheme_of(module) is None) is is_wide


@pytest.mark.parametrize("sign", ["", "+:"])
def test_gptq_may_change_bits_of_some_modules(sign: str) -> None:
    change = {"bits": 8, "group_size": 32, "sym": False}
    found = read(GPTQ | {"dynamic": {sign + r".*\.mlp\.": change}})
    assert found.scheme_of(UP) == Scheme(
        layout=Layout.GPTQ, bits=8, group_inputs=32, has_zeros=True
    )
    assert found.scheme_of(QUERY) == Scheme(
        layout=Layout.GPTQ, bits=4, group_inputs=128, has_zeros=True
    )


def test_a_cache_of_fewer_bits_is_noticed() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    config = compressed(FLOAT8, "float-quantized", FLOAT8_TOKEN, kv_cache_scheme=scheme)
    assert read(config).has_cache_scales


def group_with(**changes: Any) -> dict[str, Any]:
    config = compressed(INT8, "int-quantized", TOKEN)
    config["config_groups"]["group_0"] |= changes
    return config


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["quant_method", "compressed-tensors", "awq", "gptq"]),
    ({"quant_method": "hqq"}, ["hqq", "compressed-tensors", "gptq"]),
    ({"quant_method": "mxfp4"}, ["mxfp4", "fp8"]),
    ({"quant_method": "fbgemm_fp8"}, ["fbgemm_fp8", "fp8"]),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes", "--quantization"]),
    ({"load_in_8bit": True}, ["bitsandbytes", "millrace quantize"]),
    (compressed(INT8, "nvfp4-pack-quantized"), ["quantization_config.format", "pack-quantized"]),
    (compressed(INT8, "mixed-precision"), ["format", "int-quantized"]),
    (compressed(INT8, "int-quantized", config_groups={}), ["config_groups"]),
    (compressed(INT8, "int-quantized", config_groups={"W8A8": ["Linear"]}), ["W8A8", "object"]),
    (compressed(INT8, "int-quantized", sparsity_config={"format": "x"}), ["sparsity_config"]),
    (compressed(INT8, "int-quantized", transform_config={"config_groups": 1}), ["transform_conf"]),
    (compressed(INT8, "int-quantized", ignore=["re:["]), ["ignore", "re:["]),
    (compressed(INT8, "int-quantized", ignore="lm_head"), ["ignore", "list"]),
    (group_with(output_activations=TOKEN), ["group_0.output_activations"]),
    (group_with(weights=None), ["group_0.weights", "input_activations"]),
    (group_with(targets=[]), ["group_0.targets"]),
    (compressed(FLOAT8, "int-quantized"), ["weights.type", "int"]),
    (compressed(INT8 | {"num_bits": 2}, "pack-quantized"), ["weights.num_bits", "4 or 8"]),
    (compressed(INT8 | {"num_bits": 4}, "int-quantized"), ["weights.num_bits", "8"]),
    (compressed(INT8 | {"dynamic": True}, "int-quantized"), ["weights.dynamic"]),
    (compressed(INT8 | {"actorder": "random"}, "int-quantized"), ["weights.actorder", "group"]),
    (compressed(INT8 | {"strategy": "tensor_group"}, "int-quantized"), ["strategy", "channel"]),
    (compressed(INT4 | {"group_size": 0}, "pack-quantized"), ["weights.group_size"]),
    (compressed(FLOAT8 | {"symmetric": False}, "float-quantized"), ["weights.symmetric"]),
    (compressed(BLOCKS | {"block_structure": [128]}, "float-quantized"), ["block_structure"]),
    (compressed(INT4, "pack-quantized", TOKEN), ["weights.num_bits", "8 beside"]),
    (compressed(INT8, "int-quantized", FLOAT8_TOKEN), ["input_activations.type", "int"]),
    (compressed(INT8, "int-quantized", TOKEN | {"num_bits": 4}), ["input_activations.num_bits"]),
    (compressed(INT8, "int-quantized", TOKEN | {"symmetric": False}), ["activations.symmetric"]),
    (compressed(INT8, "int-quantized", TOKEN | {"dynamic": False}), ["activations.strategy"]),
    (compressed(INT8, "int-quantized", TOKEN | {"dynamic": "local"}), ["activations.dynamic"]),
    (compressed(FLOAT8, "float-quantized", FLOAT8_GROUP), ["group_size", "the weights'"]),
    (AWQ | {"version": "gemv"}, ["quantization_config.version", "gemm", "gemv"]),
    (AWQ | {"bits": 3}, ["bits", "4"]),
    (AWQ | {"zero_point": False}, ["zero_point"]),
    (AWQ | {"modules_to_not_convert": "gate"}, ["modules_to_not_convert"]),
    (GPTQ | {"bits": 3}, ["bits", "4 or 8"]),
    ({"quant_method": "gptq", "bits": 4}, ["group_size", "missing"]),
    (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format", "gptq_v2"]),
    (GPTQ | {"sym": "yes"}, ["sym"]),
    (GPTQ | {"dynamic": {"-:[": {}}}, ["dynamic", "-:["]),
    (GPTQ | {"dynamic": {".*": {"adapter": 1}}}, ["dynamic", "group_size"]),
    (GPTQ | {"dynamic": {".*": {"bits": 2}}}, ["dynamic..*.bits", "4 or 8"]),
    (FP8 | {"fmt": "e5m2"}, ["fmt", "e4m3"]),
    (FP8 | {"scale_fmt": "ue8m0"}, ["scale_fmt", "float"]),
    (FP8 | {"expert_dtype": "fp4"}, ["expert_dtype", "fp8"]),
    (FP8 | {"activation_scheme": "none"}, ["activation_scheme", "static"]),
    (FP8 | {"weight_block_size": [128, 0]}, ["weight_block_size"]),
    (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"}, ["dynamic"]),
]


@pytest.mark.parametrize(("config", "words"), BAD)
def test_what_is_not_computed_is_named(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    for word in ["config.json", *words]:
        assert word in caught.value.message


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
def test_a_file_that_says_so_too_is_fine(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps({"bits": 4}))
    refuse_side_files(tmp_path, is_quantized=True)
    with pytest.raises(CheckpointError, match="quantization_config"):
        refuse_side_files(tmp_path, is_quantized=False)
