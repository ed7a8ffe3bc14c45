"""Damaged checkpoints: the error names a missing, cut, misshapen or superfluous tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from millrace.engine.models.loader import load_weights
from millrace.registry.checkpoints.checkpoint import open_tensors, read_model_config
from millrace.schemas.errors import CheckpointError
from tests.engine.checkpoints import save_base_model, save_model

CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
}
NUM_LAYERS = 2
EACH = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=[*CHANGES, "sharded", "base"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of each family, one of them in shards and one without a head."""
    path = tmp_path_factory.mktemp("whole")
    if request.param == "base":
        save_base_model(path, "Qwen3", num_hidden_layers=NUM_LAYERS)
    elif request.param == "sharded":
        save_model(path, "Llama", max_shard_size="50KB", num_hidden_layers=NUM_LAYERS)
    else:
        changes = CHANGES[request.param] | {"num_hidden_layers": NUM_LAYERS}
        save_model(path, request.param, **changes)
    load(path)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[[], Path]:
    def make() -> Path:
        return Path(shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True))

    return make


def load(path: Path) -> None:
    config = read_model_config(path)
    load_weights(path, config, dtype=torch.float32, device=torch.device("cpu"))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    for word in words:
        # The whole name, not a longer name that contains it.
        assert re.search(rf"(?<![\w.]){re.escape(word)}(?![\w]|\.\w)", caught.value.message), word


def draw_tensor(data: st.DataObject, path: Path) -> tuple[str, Path]:
    index = open_tensors(path)
    name = data.draw(st.sampled_from(sorted(index)))
    return name, index[name].file


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@EACH
@given(data=st.data())
def test_a_missing_tensor(copy: Callable[[], Path], data: st.DataObject) -> None:
    path = copy()
    name, file = draw_tensor(data, path)
    rewrite(file, lambda tensors: tensors.__delitem__(name))
    refused(path, name)


@EACH
@given(data=st.data())
def test_a_tensor_under_another_name(copy: Callable[[], Path], data: st.DataObject) -> None:
    path = copy()
    name, file = draw_tensor(data, path)
    rewrite(file, lambda tensors: tensors.update({f"{name}2": tensors.pop(name)}))
    refused(path, name)


@EACH
@given(data=st.data(), other=st.sampled_from(["longer", "shorter", "deeper", "flat"]))
def test_another_shape(copy: Callable[[], Path], data: st.DataObject, other: str) -> None:
    path = copy()
    name, file = draw_tensor(data, path)

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors[name]
        shapes = {
            "longer": torch.cat((old, old[:1])),
            "shorter": old[:-1].clone(),
            "deeper": old[None].clone(),
            "flat": old.flatten() if old.dim() > 1 else old[:, None].clone(),
        }
        tensors[name] = shapes[other]

    shape = open_tensors(path)[name].shape
    rewrite(file, reshape)
    refused(path, name)
    with pytest.raises(CheckpointError, match=re.escape(str(list(shape)))):
        load(path)


@EACH
@given(data=st.data(), dtype=st.sampled_from([torch.int8, torch.float64, torch.bool]))
def test_another_dtype(copy: Callable[[], Path], data: st.DataObject, dtype: torch.dtype) -> None:
    path = copy()
    name, file = draw_tensor(data, path)
    rewrite(file, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(path, name)


@EACH
@given(data=st.data())
def test_a_file_cut_within_a_tensor(copy: Callable[[], Path], data: st.DataObject) -> None:
    path = copy()
    name, file = draw_tensor(data, path)
    content = file.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + header_bytes])[name]["data_offsets"]
    file.write_bytes(content[: 8 + header_bytes + data.draw(st.integers(start, end - 1))])
    refused(path, name)


@EACH
@given(data=st.data())
def test_a_tensor_too_many(copy: Callable[[], Path], data: st.DataObject) -> None:
    path = copy()
    _, file = draw_tensor(data, path)
    index = path / "model.safetensors.index.json"
    rewrite(file, lambda tensors: tensors.update(extra=torch.zeros(2)))
    if index.is_file():
        listed = json.loads(index.read_text())
        listed["weight_map"]["extra"] = file.name
        index.write_text(json.dumps(listed))
    refused(path, "extra")


def test_the_files_are_whole(whole: Path) -> None:
    """The undamaged checkpoint of the property tests has every tensor in some file."""
    names = set()
    for file in whole.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    assert names == set(open_tensors(whole))
