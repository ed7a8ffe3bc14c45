"""config.json and safetensors files, good and bad."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from millrace.registry.checkpoints.checkpoint import (
    CheckpointError,
    open_tensors,
    read_model_config,
)
from millrace.registry.checkpoints.side_files import ignored_parts

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
}


FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
MIXED = ["full_attention", "sliding_attention"]
QWEN2_WINDOWS: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 1,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}

MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"]}
QWEN3_MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}


def write_config(path: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_llama_defaults(tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path))
    assert config.head_dim == 16
    assert config.rope_theta == 10_000.0
    assert config.rope_scaling is None
    assert not config.qk_norm
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))
    assert config.dtype == "float32"


def test_qwen3_has_qk_norm_and_its_own_head_dim(tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, architectures=["Qwen3ForCausalLM"]))
    assert config.qk_norm
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7}, (None, None)),  # a Llama has none, even if its file says so
        (QWEN2_WINDOWS, (None, 7)),
        (QWEN2_WINDOWS | {"max_window_layers": 0}, (7, 7)),
        (QWEN2_WINDOWS | {"max_window_layers": ...}, (None, None)),
        (QWEN2_WINDOWS | {"sliding_window": ...}, (None, 4096)),
        (QWEN2_WINDOWS | {"use_sliding_window": False}, (None, None)),
        (QWEN2_WINDOWS | {"layer_types": MIXED[::-1]}, (7, None)),
        (QWEN2_WINDOWS | {"layer_types": FULL}, (None, None)),
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 9, "layer_types": SLIDING}, (9, 9)),
    ],
)
def test_windows_by_layer(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_model_config(write_config(tmp_path, **changes)).windows == windows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (MIXTRAL, ((0, 1), 8, 2, 128, True)),
        (MIXTRAL | {"num_local_experts": 4, "num_experts_per_tok": 4}, ((0, 1), 4, 4, 128, True)),
        (QWEN3_MOE, ((0, 1), 128, 8, 24, False)),
        (QWEN3_MOE | {"num_experts": 16, "norm_topk_prob": True}, ((0, 1), 16, 8, 24, True)),
        (QWEN3_MOE | {"num_local_experts": 16}, ((0, 1), 16, 8, 24, False)),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, ((1,), 128, 8, 24, False)),
        (QWEN3_MOE | {"mlp_only_layers": [1]}, ((0,), 128, 8, 24, False)),
        (QWEN3_MOE | {"mlp_only_layers": [0, 1]}, None),
        ({"num_local_experts": 4}, None),
    ],
)
def test_experts_by_layer(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[Any, ...] | None
) -> None:
    experts = read_model_config(write_config(tmp_path, **changes)).experts
    assert (None if experts is None else msgspec.structs.astuple(experts)) == expected


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        (
            {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            2e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5} | LLAMA3_ROPE},
            5e5,
            LLAMA3_ROPE | {"original_max_position_embeddings": 512},
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 128},
            },
            1e4,
            LLAMA3_ROPE | {"original_max_position_embeddings": 64},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 3},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            1e6,
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": {}},
            1e6,
            None,
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 3}},
            1e4,
            {"rope_type": "dynamic", "factor": 3.0},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 256,
                }
            },
            1e4,
            YARN_ROPE | {"factor": 2.0, "attention_factor": 0.1 * math.log(2) + 1},
        ),
        (
            {"rope_scaling": YARN_ROPE | {"factor": 4.0, "mscale": 2, "mscale_all_dim": 1}},
            1e4,
            YARN_ROPE
            | {
                "factor": 4.0,
                "attention_factor": (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
            },
        ),
    ],
)
def test_rope_in_old_and_new_layout(
    tmp_path: Path, changes: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    config = read_model_config(write_config(tmp_path, **changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("scaling", "window"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        (LLAMA3_ROPE, 512),
        (YARN_ROPE | {"factor": 4.0}, 1024),
        (YARN_ROPE | {"factor": 2.0}, 512),
    ],
)
def test_scaling_extends_the_context_window(
    tmp_path: Path, scaling: dict[str, Any] | None, window: int
) -> None:
    config = read_model_config(write_config(tmp_path, rope_scaling=scaling))
    assert config.context_window_tokens == window


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_under_either_name(tmp_path: Path, field: str) -> None:
    assert read_model_config(write_config(tmp_path, **{field: "bfloat16"})).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Llama", "Qwen3"]),
        ({"architectures": ...}, ["architectures", "missing"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"vocab_size": "100"}, ["vocab_size", "positive integer", "'100'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor"]),
        ({"hidden_size": 66}, ["head_dim", "66"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope", "linear, dynamic, yarn, llama3"]),
        ({"rope_scaling": {"type": 3}}, ["rope_scaling", "rope_type"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1}}, ["high_freq_factor", "above"]),
        ({"rope_scaling": YARN_ROPE | {"factor": 2.0, "mscale": "x"}}, ["mscale", "number"]),
        ({"rope_scaling": YARN_ROPE | {"factor": 2.0, "truncate": 1}}, ["truncate"]),
        ({"rope_scaling": YARN_ROPE}, ["factor", "missing"]),
        (
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            ["rope_theta", "rope_scaling", "10000"],
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters"]),
        (MIXTRAL | {"num_experts_per_tok": 9}, ["num_experts_per_tok", "(8)"]),
        (MIXTRAL | {"num_local_experts": 0}, ["num_local_experts"]),
        (QWEN3_MOE | {"moe_intermediate_size": ...}, ["moe_intermediate_size", "missing"]),
        (QWEN3_MOE | {"mlp_only_layers": ["one"]}, ["mlp_only_layers"]),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, ["decoder_sparse_step"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "one a layer"]),
        (QWEN2_WINDOWS | {"sliding_window": 0}, ["sliding_window"]),
        (QWEN2_WINDOWS | {"sliding_window": None, "layer_types": SLIDING}, ["layer_types"]),
        (QWEN2_WINDOWS | {"max_window_layers": -1}, ["max_window_layers"]),
        ({"architectures": ["MistralForCausalLM"], "layer_types": MIXED}, ["layer_types"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"dtype": "int8"}, ["dtype", "bfloat16"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings"]),
        ({"eos_token_id": "two"}, ["eos_token_id"]),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(write_config(tmp_path, **changes))
    for word in ["config.json", *words]:
        assert word in caught.value.message


@pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff\xfe"])
def test_a_bad_config_file_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    if isinstance(content, str):
        (tmp_path / "config.json").write_text(content)
    elif content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


def write_shards(path: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4).to(torch.bfloat16)}
    save_file({"a": tensors["a"]}, path / "one.safetensors")
    save_file({"b": tensors["b"]}, path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_single_file(tmp_path: Path) -> None:
    weights = torch.randn(3, 5)
    save_file({"w": weights}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = open_tensors(tmp_path)
    assert list(index) == ["w"]
    assert (index["w"].shape, index["w"].dtype) == ((3, 5), "F32")
    assert torch.equal(index.load("w", (3, 5)), weights)


def test_slices_of_tensors(tmp_path: Path) -> None:
    weights, bias = torch.randn(6, 5), torch.randn(6)
    save_file({"w": weights, "b": bias}, tmp_path / "model.safetensors")
    index = open_tensors(tmp_path)
    rows, columns = range(2, 5), range(1, 3)
    assert torch.equal(index.load("w", (6, 5), rows=rows), weights[2:5])
    assert torch.equal(index.load("w", (6, 5), columns=columns), weights[:, 1:3])
    assert torch.equal(index.load("w", (6, 5), rows=rows, columns=columns), weights[2:5, 1:3])
    assert torch.equal(index.load("b", (6,), rows=rows), bias[2:5])
    # The whole tensor is checked.
    with pytest.raises(CheckpointError, match=r"Tensor w .*\[6, 5\].*\[3, 5\]"):
        index.load("w", (3, 5), rows=rows)


def test_shards(tmp_path: Path) -> None:
    tensors = write_shards(tmp_path)
    index = open_tensors(tmp_path)
    assert index["b"].dtype == "BF16"
    for name, tensor in tensors.items():
        assert torch.equal(index.load(name, tuple(tensor.shape)), tensor)


def test_missing_and_wrong_shaped_tensors_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.randn(3, 5)}, tmp_path / "model.safetensors")
    index = open_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"Tensor v is missing"):
        index.load("v", (3, 5))
    with pytest.raises(CheckpointError, match=r"Tensor w .*\[3, 5\].*\[5, 3\]"):
        index.load("w", (5, 3))


def test_an_integer_tensor_is_refused_unless_asked_for(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"Tensor w .* stored as I8"):
        open_tensors(tmp_path).load("w", (2,))
    assert open_tensors(tmp_path).load("w", (2,), ("I8",)).dtype is torch.int8
    with pytest.raises(CheckpointError, match=r"Tensor w .* stored as I8; supported are I32"):
        open_tensors(tmp_path).load("w", (2,), ("I32",))


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_tensors(tmp_path)


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.randn(2, 3), "b": torch.randn(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json.* weight_map"):
        open_tensors(tmp_path)


def test_an_index_may_list_the_single_file(tmp_path: Path) -> None:
    save_file({"w": torch.randn(3, 5)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(open_tensors(tmp_path)) == ["w"]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("quantize_config.json", "quantized"),
        ("hf_quant_config.json", "quantized"),
        ("adapter_config.json", "adapter"),
    ],
)
def test_a_file_that_makes_another_model_of_the_weights_is_refused(
    tmp_path: Path, name: str, word: str
) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name} .*{word}"):
        read_model_config(tmp_path)


def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    write_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    assert ["auto_map" in sentence for sentence in ignored_parts(tmp_path)] == [True]
    (tmp_path / "adapter_model.safetensors").touch()
    assert "adapter_model.safetensors" in ignored_parts(tmp_path)[1]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks two\.safetensors"):
        open_tensors(tmp_path)


def test_shard_without_the_tensor_it_should_have(tmp_path: Path) -> None:
    write_shards(tmp_path)
    weight_map = {"a": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"lack: c\."):
        open_tensors(tmp_path)


def test_index_may_not_leave_its_folder(tmp_path: Path) -> None:
    weight_map = {"a": "../one.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"plain file names"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 4, 20, -1])
def test_truncated_file(tmp_path: Path, kept_bytes: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(3, 5)}, file)
    file.write_bytes(file.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        open_tensors(tmp_path)


def test_malformed_header(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"malformed header for w"):
        open_tensors(tmp_path)
