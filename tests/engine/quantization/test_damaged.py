"""Damaged quantized modules: the error names a missing or invalid tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file

from millrace.engine.models.loader import load_weights
from millrace.engine.quantization.checkpoint import read_quantized
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.quantization.scheme import Layout, Scheme
from millrace.schemas.errors import CheckpointError
from tests.engine.checkpoints import save_model
from tests.engine.quantization.written import Writer, awq, compressed, float8, gptq, rewrite

Damage = Callable[[torch.Tensor], torch.Tensor | None]
MODULE = "model.layers.1.mlp.up_proj"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
PACKED = {"weights": INT4, "format": "pack-quantized"}
CONFIGS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "packed": (
        compressed(PACKED),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": PACKED | {"targets": ["Linear"]}},
            "ignore": ["lm_head"],
        },
    ),
    "fp8": (
        float8(32),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
    "static": (
        float8(None, static=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "gptq": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32}),
}


def gone(tensor: torch.Tensor) -> None:
    return None


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1].clone()


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.flatten().clone()
    damaged[-1] = torch.nan
    return damaged.view(tensor.shape)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def beyond(groups: torch.Tensor) -> torch.Tensor:
    return torch.where(groups == 1, 2, groups)


def below(groups: torch.Tensor) -> torch.Tensor:
    return torch.where(groups == 1, -1, groups)


def uneven(groups: torch.Tensor) -> torch.Tensor:
    damaged = groups.clone()
    damaged[0] = 1
    return damaged


def negative(scale: torch.Tensor) -> torch.Tensor:
    return -scale


CASES: list[tuple[str, str, Damage]] = [
    ("packed", "weight_packed", gone),
    ("packed", "weight_packed", cut),
    ("packed", "weight_scale", gone),
    ("packed", "weight_scale", cut),
    ("packed", "weight_scale", not_finite),
    ("packed", "weight_shape", gone),
    ("packed", "weight_shape", negative),
    ("packed", "weight_zero_point", gone),
    ("packed", "weight_zero_point", cut),
    ("fp8", "weight", wide),
    ("fp8", "weight", cut),
    ("fp8", "weight_scale_inv", cut),
    ("fp8", "weight_scale_inv", not_finite),
    ("static", "weight_scale", gone),
    ("static", "input_scale", gone),
    ("static", "input_scale", not_finite),
    ("static", "input_scale", negative),
    ("awq", "qweight", gone),
    ("awq", "qweight", cut),
    ("awq", "qweight", wide),
    ("awq", "qzeros", gone),
    ("awq", "scales", cut),
    ("awq", "scales", not_finite),
    ("gptq", "qweight", cut),
    ("gptq", "qzeros", cut),
    ("gptq", "scales", gone),
    ("gptq", "g_idx", beyond),
    ("gptq", "g_idx", below),
    ("gptq", "g_idx", uneven),
    ("gptq", "g_idx", wide),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name, (write, config) in CONFIGS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        save_model(paths[name], "Llama", **SIZES)
        rewrite(paths[name], {r"self_attn|mlp\.": write}, config)
        load(paths[name])
    return paths


def load(path: Path) -> None:
    config = read_model_config(path)
    load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(("kind", "part", "damage"), CASES)
def test_a_damaged_tensor_is_named(
    whole: dict[str, Path], tmp_path: Path, kind: str, part: str, damage: Damage
) -> None:
    tensors = load_file(whole[kind] / "model.safetensors")
    name = f"{MODULE}.{part}"
    damaged = damage(tensors.pop(name))
    if damaged is not None:
        tensors[name] = damaged
    (tmp_path / "config.json").write_text((whole[kind] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(tmp_path)


def test_a_missing_scale_of_blocks_is_missed(whole: dict[str, Path], tmp_path: Path) -> None:
    """The error has the name that most formats give the scale."""
    tensors = load_file(whole["fp8"] / "model.safetensors")
    del tensors[f"{MODULE}.weight_scale_inv"]
    (tmp_path / "config.json").write_text((whole["fp8"] / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.weight_scale is missing"):
        load(tmp_path)


class Held(dict[str, torch.Tensor]):
    """Tensors of one module."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self[name].shape) if name in self else None

    def load(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        assert self.shape_of(name) == shape, name
        return self[name]


def read(write: Writer, scheme: Scheme, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    written = write(weight)
    held = Held({f"m.{part}": tensor for part, tensor in written.tensors.items()})
    rows, columns = weight.shape
    return read_quantized(held, "m", scheme, rows, columns).values(), written.weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_zero_points_of_zero_wrap_around(bits: int, v2: bool) -> None:
    """GPTQModel stores zero points minus one, and borrows from the next."""
    layout = Layout.GPTQ_V2 if v2 else Layout.GPTQ
    weight = torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) + 0.1
    weight[::3] -= 0.5
    scheme = Scheme(layout=layout, bits=bits, group_inputs=32, has_zeros=True)
    ours, theirs = read(gptq(bits, 32, sym=False, v2=v2), scheme, weight)
    torch.testing.assert_close(ours, theirs)


def test_a_last_group_may_be_shorter() -> None:
    weight = torch.randn(16, 80, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(layout=Layout.GPTQ, bits=4, group_inputs=32, has_zeros=True)
    ours, theirs = read(gptq(4, 32, sym=False, shuffled=True), scheme, weight)
    torch.testing.assert_close(ours, theirs)
    blocks = Scheme(layout=Layout.PLAIN, is_float=True, group_inputs=32, block_outputs=32)
    ours, theirs = read(float8(32), blocks, torch.randn(40, 80))
    torch.testing.assert_close(ours, theirs)


def test_order_of_older_packed_checkpoints() -> None:
    """The weight is quantized with its columns in the order of their groups, then stored in its
    own; without an order, all of ``weight_g_idx`` is -1."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    written = compressed(PACKED)(weight)
    scheme = Scheme(layout=Layout.PACKED, bits=4, group_inputs=32, has_zeros=True)
    held = Held({f"m.{part}": tensor for part, tensor in written.tensors.items()})
    held["m.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert read_quantized(held, "m", scheme, 16, 64).order is None
    codes = unpack_from_int32(held["m.weight_packed"], 4, torch.Size((16, 64)))
    held["m.weight_packed"] = pack_to_int32(codes[:, shuffled], 4)
    held["m.weight_g_idx"] = (torch.arange(64) // 32)[shuffled].int()
    read_back = read_quantized(held, "m", scheme, 16, 64)
    assert read_back.order is not None
    torch.testing.assert_close(read_back.values(), written.weight[:, shuffled])


def test_outputs_that_do_not_fill_a_word_are_refused() -> None:
    scheme = Scheme(layout=Layout.AWQ, bits=4, group_inputs=32, has_zeros=True)
    with pytest.raises(CheckpointError, match=r"m\.qweight.* 12 outputs"):
        read_quantized(Held(), "m", scheme, 12, 64)
