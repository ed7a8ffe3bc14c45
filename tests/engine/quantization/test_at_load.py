"""Quantization at load: the weights are those of a quantized checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from millrace.engine.quantization.rounding import quantize_at_load
from millrace.engine.step.engine import Engine
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import QUANTIZATIONS, EngineKind, check_quantization
from millrace.schemas.errors import ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.support import drain, prompt, request, tokens_by_request

KERNELS = ("auto", "torch", "reference")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    save_llama(path, hidden_size=96, intermediate_size=160)
    return path


def answers(path: Path, kernels: str, quantization: str | None = None) -> dict[str, list[int]]:
    engine = Engine.load(
        path,
        EngineConfig(
            device="cpu",
            dtype="float32",
            kernels=kernels,
            quantization=quantization,
            num_blocks=32,
            max_batch_tokens=64,
            cuda_graphs=False,
        ),
    )
    for number in range(3):
        engine.add(request(f"r{number}", prompt(number, 5 + 6 * number)))
    return tokens_by_request(drain(engine))


def rewritten(wide: Path, folder: Path, quantization: str) -> Path:
    """Save a wide checkpoint with the values of rounded weights."""
    at_load = quantize_at_load(quantization)
    assert at_load.layers is not None
    assert at_load.head is not None
    shutil.copytree(wide, folder)
    tensors = load_file(wide / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = at_load.layers(tensor).values()
        elif name == "lm_head.weight":
            tensors[name] = at_load.head(tensor).values()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_engine_computes_with_the_rounded_weights(
    wide: Path, tmp_path: Path, kernels: str
) -> None:
    given = answers(wide, kernels, "int4")
    assert given == answers(rewritten(wide, tmp_path / "int4", "int4"), kernels)
    assert given != answers(wide, kernels)


def test_tritons_kernels_give_the_same_as_those_of_torch(tmp_path: Path) -> None:
    """The model has one layer and few tokens, since the interpreter is slow."""
    save_llama(tmp_path, num_hidden_layers=1, hidden_size=96, intermediate_size=64)
    settings = EngineConfig(
        device="cpu",
        dtype="float32",
        quantization="int4",
        num_blocks=4,
        cuda_graphs=False,
        max_num_sequences=1,
        max_batch_tokens=16,
    )
    made = []
    for kernels in ("reference", "triton"):
        engine = Engine.load(tmp_path, replace(settings, kernels=kernels))
        engine.add(request("r", prompt(1, 5), max_tokens=3, ignore_eos=True))
        made.append(tokens_by_request(drain(engine)))
    assert made[0] == made[1]


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_all_runners_give_the_same(wide: Path, quantization: str) -> None:
    first, *others = (answers(wide, kernels, quantization) for kernels in KERNELS)
    assert all(other == first for other in others)


def test_each_quantization_has_weights_of_its_own(wide: Path) -> None:
    prints = [weights_fingerprint(wide, name) for name in (None, *QUANTIZATIONS)]
    assert len(set(prints)) == 4
    assert {len(one) for one in prints} == {16}
    assert weights_fingerprint(wide) == prints[0]
    assert weights_fingerprint(wide / "nowhere", "int8") == ""


def test_a_bad_word_is_told_the_good_ones(wide: Path) -> None:
    with pytest.raises(ConfigError, match="'int3'; choose int8, int4, fp8"):
        Engine.load(wide, EngineConfig(device="cpu", quantization="int3"))


@pytest.mark.parametrize("kind", [kind for kind in EngineKind if kind is not EngineKind.REAL])
def test_quantization_at_load_is_for_our_own_engine(kind: EngineKind) -> None:
    check_quantization("int8", EngineKind.REAL)
    check_quantization(None, kind)
    with pytest.raises(ConfigError, match=f"own engine, and {kind} runs this model"):
        check_quantization("int8", kind)
