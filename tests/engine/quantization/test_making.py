"""Quantized checkpoints of our own, as read by transformers and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file

from millrace.engine.quantization.rounding import rounded_float8, rounded_int4, rounded_int8
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.engine.quantizer.checkpoint import Made, Recipe, quantize_checkpoint
from millrace.engine.quantizer.schemes import QuantizerScheme
from millrace.registry.checkpoints.checkpoint import open_tensors
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import reference_logits, save_base_model, save_classifier, save_model
from tests.support.small_disk import small_disk

CPU = torch.device("cpu")
# Neither 96 nor 320 inputs divide by 128: groups are of 96 and of 64.
SHAPE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 2}
MIXTURE = {"num_local_experts": 3, "num_experts_per_tok": 2}
TOKENS = [5, 17, 40, 99, 3, 3, 120, 64, 181]
ROUNDED: dict[QuantizerScheme, Callable[..., QuantizedWeight]] = {
    QuantizerScheme.W8A8_INT8: rounded_int8,
    QuantizerScheme.W8A8_FP8: rounded_float8,
    QuantizerScheme.W4A16: rounded_int4,
}


def made(source: Path, output: Path, scheme: QuantizerScheme, **options: Any) -> Made:
    shard = {"shard_bytes": options.pop("shard_bytes")} if "shard_bytes" in options else {}
    return quantize_checkpoint(source, output, Recipe(scheme, **options), CPU, **shard)


def read(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def linears(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the linear maps of the layers, without routers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layers" in name and not name.endswith(".gate")
    }


def rounded_rows(scheme: QuantizerScheme, rows: torch.Tensor) -> torch.Tensor:
    """Round rows as compressed-tensors does: to int8 by half of 255 steps, where others take
    127."""
    most = rows.abs().amax(-1, keepdim=True)
    if scheme is QuantizerScheme.W8A8_INT8:
        scales = most / 127.5
        return (rows / scales).round().clamp(-128, 127) * scales
    scales = most / 448
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def rounded(model: Any, scheme: QuantizerScheme) -> Any:
    """Round and widen the weights of ``model`` in place; round the rows that they multiply, too, if
    the scheme says so."""
    for module in linears(model).values():
        module.weight.data = ROUNDED[scheme](module.weight.detach()).values()
        if scheme is not QuantizerScheme.W4A16:
            module.register_forward_pre_hook(
                lambda _, inputs: (rounded_rows(scheme, inputs[0]), *inputs[1:])
            )
    return model


@pytest.mark.parametrize("scheme", list(QuantizerScheme))
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_computes_with_the_rounded_weights(
    tmp_path: Path, scheme: QuantizerScheme, family: str
) -> None:
    tied = family == "Qwen3"
    wide = save_model(tmp_path / "wide", family, tie_word_embeddings=tied, **SHAPE)
    plain = reference_logits(wide, TOKENS)
    summary = made(tmp_path / "wide", tmp_path / "made", scheme)
    assert summary.num_quantized == 14
    assert summary.bytes_after < summary.bytes_before / 2
    expected = reference_logits(rounded(wide, scheme), TOKENS)
    given = reference_logits(read(tmp_path / "made"), TOKENS)
    # A row's value in the middle of two codes may fall to either.
    tolerance = 1e-4 if scheme is QuantizerScheme.W4A16 else 2e-2
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=1e-4)
    assert (given - plain).norm() > 3 * (given - expected).norm()


@pytest.mark.parametrize("scheme", list(QuantizerScheme))
def test_quantized_checkpoint_describes_itself(tmp_path: Path, scheme: QuantizerScheme) -> None:
    save_model(tmp_path / "wide", "Llama", **SHAPE)
    made(tmp_path / "wide", tmp_path / "made", scheme, group_inputs=64)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (said["quant_method"], said["ignore"]) == ("compressed-tensors", ["lm_head"])
    groups = [group["weights"]["group_size"] for group in said["config_groups"].values()]
    assert groups == ([64, 32] if scheme is QuantizerScheme.W4A16 else [None])
    for group in said["config_groups"].values():
        assert QuantizationScheme.model_validate(group).format == said["format"]


def test_what_inputs_no_group_divides_have_a_scale_for_each_output(tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", "Llama", hidden_size=48, intermediate_size=60)
    made(tmp_path / "wide", tmp_path / "made", QuantizerScheme.W4A16)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    down = "model.layers.1.mlp.down_proj."
    assert tensors[down + "weight_shape"].tolist() == [48, 60]
    assert tensors[down + "weight_packed"].shape == (48, 8)
    assert tensors[down + "weight_scale"].shape == (48, 1)
    expected = reference_logits(rounded(wide, QuantizerScheme.W4A16), TOKENS)
    given = reference_logits(read(tmp_path / "made"), TOKENS)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_in_the_dtype_of_the_checkpoint(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path / "wide", "Llama", stored_dtype=dtype, **SHAPE)
    made(tmp_path / "wide", tmp_path / "made", QuantizerScheme.W4A16)
    before = load_file(tmp_path / "wide" / "model.safetensors")
    after = load_file(tmp_path / "made" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert after[f"{name}.weight_scale"].dtype is dtype
    assert after["model.embed_tokens.weight"].dtype is dtype
    expected = rounded_int4(before[f"{name}.weight"], scale_dtype=dtype)
    assert torch.equal(after[f"{name}.weight_scale"].float(), expected.scales)


def widened(folder: Path) -> dict[str, torch.Tensor]:
    """Decompress each quantized module with the library."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = said["config_groups"].values()
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    index = open_tensors(folder)
    files = {info.file for info in index.values()}
    tensors = {name: one for file in files for name, one in load_file(file).items()}
    modules = [name.removesuffix(".weight_scale") for name in tensors if "weight_scale" in name]
    return {
        module: compressor.decompress(
            {
                name.removeprefix(module + "."): tensor
                for name, tensor in tensors.items()
                if name.startswith(module + ".")
            },
            scheme_of(module, groups),
        )["weight"]
        for module in modules
    }


def scheme_of(module: str, groups: Iterable[dict[str, Any]]) -> QuantizationScheme:
    """Return the scheme of the one group whose targets match a module."""
    (group,) = (
        group
        for group in groups
        if any(target == "Linear" or match_name(module, target) for target in group["targets"])
    )
    return QuantizationScheme.model_validate(group)


@pytest.mark.parametrize("scheme", list(QuantizerScheme))
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mixtral", MIXTURE),
        ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
def test_each_expert_is_quantized_and_routers_are_not(
    tmp_path: Path, scheme: QuantizerScheme, family: str, changes: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
    save_model(tmp_path / "wide", family, **(sizes | changes))
    summary = made(tmp_path / "wide", tmp_path / "made", scheme, group_inputs=64)
    assert summary.num_quantized == 2 * (4 + 3 * 3)
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    values = widened(tmp_path / "made")
    assert len(values) == summary.num_quantized
    options = {"group_inputs": 64} if scheme is QuantizerScheme.W4A16 else {}
    for module, value in values.items():
        expected = ROUNDED[scheme](wide[f"{module}.weight"], **options).values()
        torch.testing.assert_close(value, expected)
    routers = [name for name in wide if name.endswith(".gate.weight")]
    kept = load_file(tmp_path / "made" / "model.safetensors")
    assert len(routers) == 2
    assert all(torch.equal(kept[name], wide[name]) for name in routers)
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert said["ignore"][0] == "lm_head"
    assert len(said["ignore"]) == 3


def test_shards_come_and_go(tmp_path: Path) -> None:
    save_model(tmp_path / "wide", "Llama", max_shard_size="200KB", **SHAPE)
    assert not (tmp_path / "wide" / "model.safetensors").exists()
    first = made(tmp_path / "wide", tmp_path / "whole", QuantizerScheme.W8A8_INT8)
    second = made(
        tmp_path / "wide", tmp_path / "cut", QuantizerScheme.W8A8_INT8, shard_bytes=50_000
    )
    assert first == second
    files = sorted(file.name for file in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    cut = open_tensors(tmp_path / "cut")
    assert set(cut) == set(whole)
    assert torch.equal(
        reference_logits(read(tmp_path / "cut"), TOKENS),
        reference_logits(read(tmp_path / "whole"), TOKENS),
    )


def test_what_lies_beside_the_weights_comes_along(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    save_base_model(wide, "Qwen3", **SHAPE)
    (wide / "tokenizer.json").write_text("{}")
    (wide / "1_Pooling").mkdir()
    (wide / "1_Pooling" / "config.json").write_text("{}")
    (wide / "pytorch_model.bin").write_text("weights of another format")
    made(wide, tmp_path / "new" / "made", QuantizerScheme.W8A8_INT8)
    files = {str(f.relative_to(tmp_path / "new")) for f in (tmp_path / "new").rglob("*")}
    assert files == {
        "made",
        "made/1_Pooling",
        "made/1_Pooling/config.json",
        "made/config.json",
        "made/model.safetensors",
        "made/tokenizer.json",
    }
    assert (tmp_path / "new" / "made" / "model.safetensors").stat().st_mode & 0o044
    said = json.loads((tmp_path / "new" / "made" / "config.json").read_text())
    assert said["quantization_config"]["ignore"] == []


def test_a_classifier_keeps_its_head(tmp_path: Path) -> None:
    save_classifier(tmp_path / "wide", "Llama", 3, **SHAPE)
    made(tmp_path / "wide", tmp_path / "made", QuantizerScheme.W8A8_INT8)
    said = json.loads((tmp_path / "made" / "config.json").read_text())
    assert said["quantization_config"]["ignore"] == ["score"]
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert tensors["score.weight"].dtype is torch.float32


# --- what is refused ---


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "model"
    save_model(path, "Llama", **SHAPE)
    return path


def refused(error: type[Exception], match: str, source: Path, output: Path, **options: Any) -> None:
    """Assert that making the checkpoint raises the error and leaves no files."""
    before = set(output.parent.iterdir())
    with pytest.raises(error, match=match):
        made(source, output, options.pop("scheme", QuantizerScheme.W4A16), **options)
    assert set(output.parent.iterdir()) == before


def test_a_folder_with_something_in_it_is_left_alone(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "notes").write_text("mine")
    refused(ConfigError, "made is not empty", wide, tmp_path / "made")
    refused(ConfigError, "is a file", wide, tmp_path / "made" / "notes")
    (tmp_path / "made" / "notes").unlink()
    made(wide, tmp_path / "made", QuantizerScheme.W4A16)
    refused(ConfigError, "made is not empty", wide, tmp_path / "made")


def test_quantized_checkpoint_is_not_quantized_again(wide: Path, tmp_path: Path) -> None:
    made(wide, tmp_path / "made", QuantizerScheme.W8A8_INT8)
    refused(CheckpointError, "quantized already", tmp_path / "made", tmp_path / "again")
    copy = shutil.copytree(wide, tmp_path / "older")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"compression_config": {}}))
    refused(CheckpointError, "field compression_config", copy, tmp_path / "again")


@pytest.mark.parametrize("calibrated", [False, True])
def test_weights_that_are_not_finite_are_named(
    wide: Path, tmp_path: Path, calibrated: bool
) -> None:
    copy = shutil.copytree(wide, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    options = {"texts": [TOKENS]} if calibrated else {}
    refused(CheckpointError, "layers.1.mlp.up_proj.weight", copy, tmp_path / "made", **options)


def test_a_full_disk_is_told(wide: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mib=1) as disk:
        disk.fill()
        refused(ConfigError, "made cannot be written: .*[Nn]o space", wide, disk.path / "made")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"group_inputs": 0}, "multiple of 32 inputs, got 0"),
        ({"group_inputs": 100}, "multiple of 32 inputs, got 100"),
        ({"scheme": QuantizerScheme.W8A8_INT8, "texts": [[1]]}, "w8a8-int8 needs no calibration"),
        ({"texts": []}, "no tokens"),
        ({"texts": [[], []]}, "no tokens"),
    ],
)
def test_what_does_not_go_together_is_told(
    wide: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    refused(ConfigError, told, wide, tmp_path / "made", **options)
