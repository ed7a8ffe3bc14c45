"""GGUF models in the own engine, compared with transformers and with the checkpoints that they
were made of.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.models.gguf_tensors import GgufTensors
from millrace.engine.quantization.gguf_blocks import QUANTIZED_TYPES
from millrace.engine.step.engine import Engine
from millrace.engine.step.settings import resolve
from millrace.registry.checkpoints.checkpoint import (
    gguf_parts,
    open_tensors,
    read_model_config,
    why_not_own,
)
from millrace.registry.gguf import checkpoint_folder as folders
from millrace.registry.gguf.checkpoint_folder import checkpoint_folder
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_base_model, save_model
from tests.engine.models.test_decoder import (
    CHUNKS,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    check_greedy,
    logits_of,
)
from tests.engine.support import drain, request, tokens_by_request
from tests.support.engine.tokenizers_made import CHAT_TEMPLATE, byte_level, write_tokenizer
from tests.support.gguf_files import write_gguf

_FLOAT32 = EngineConfig(num_blocks=32, dtype="float32", device="cpu")
_K_WIDTHS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiled kernels stay in the user's cache.
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "cache")


def saved(folder: Path, family: str, **changes: Any) -> Any:
    """A random checkpoint with a tokenizer in ``folder``; transformers' model of it."""
    tokenizer = byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1}
    model = save_model(folder, family, **(sizes | changes))
    write_tokenizer(folder, tokenizer, chat_template=CHAT_TEMPLATE)
    return model


def runner_of(folder: Path, config: EngineConfig = _FLOAT32) -> ModelRunner:
    return ModelRunner.load(folder, resolve(folder, config))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Llama", {}, id="llama"),
        pytest.param("Llama", {"tie_word_embeddings": True}, id="llama-tied"),
        pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
        pytest.param("Llama", {"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
        pytest.param("Llama", {"rope_parameters": LINEAR_ROPE}, id="llama-linear-rope"),
        pytest.param("Llama", {"rope_parameters": _YARN_ROPE}, id="llama-yarn"),
        pytest.param("Mistral", {"sliding_window": 7}, id="mistral-window"),
        pytest.param("Qwen2", {"tie_word_embeddings": True}, id="qwen2"),
        pytest.param("Qwen3", {}, id="qwen3"),
        pytest.param(
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            id="qwen3-windows",
        ),
        pytest.param("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, id="mixtral"),
        pytest.param(
            "Qwen3Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
            id="qwen3moe",
        ),
    ],
)
def test_logits_are_the_checkpoints_and_tokens_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = saved(tmp_path / "hf", family, **changes)
    folder = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "float32"))
    theirs = logits_of(runner_of(tmp_path / "hf"), CHUNKS)
    for one, other in zip(logits_of(runner_of(folder), CHUNKS), theirs, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
    check_greedy(Engine.load(folder, _FLOAT32), model, 8)


def test_embedding_models_have_no_head(tmp_path: Path) -> None:
    tokenizer = byte_level()
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1}
    save_base_model(tmp_path / "hf", "Qwen3", **sizes)
    write_tokenizer(tmp_path / "hf", tokenizer)
    folder = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "float32"))
    config = read_model_config(folder)
    assert (config.architecture, config.has_head) == ("Qwen3Model", False)
    tensors = GgufTensors(gguf_parts(folder), config)
    stored = open_tensors(tmp_path / "hf")
    assert set(tensors) == {f"model.{name}" for name in stored}
    for name, info in stored.items():
        assert torch.equal(tensors.load(f"model.{name}", info.shape), stored.load(name, info.shape))


def drawn_blocks(
    kind: GGMLQuantizationType, shape: tuple[int, ...], seed: int
) -> tuple[npt.NDArray[Any], GGMLQuantizationType]:
    """Blocks of random codes whose values are near 0.1."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    num_blocks = shape[-1] // block_size
    blocks = draw.integers(0, 256, (*shape[:-1], num_blocks, block_bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    largest = {"Q2_K": 45, "Q3_K": 128, "Q4_K": 945, "Q5_K": 1953, "Q6_K": 4096, "IQ4_XS": 4064}
    scale = 0.2 / largest.get(kind.name, 127 if kind.name in ("Q8_0", "IQ4_NL") else 15)
    for place in (places | halves).get(kind.name, (0,)):
        half = np.full(blocks.shape[:-1], scale, np.float16)
        blocks[..., place : place + 2] = half[..., None].view(np.uint8)
    if kind == GGMLQuantizationType.MXFP4:
        blocks[..., 0] = 121
    return blocks.reshape(*shape[:-1], -1), kind


def write_quantized(folder: Path, kinds: list[GGMLQuantizationType], family: str = "Llama") -> Path:
    """A GGUF file whose matrices take the ``kinds`` in turns, and a folder ``wide`` with the same
    numbers in float32. The first file is returned.
    """
    saved(folder / "hf", family, **_K_WIDTHS)
    names = gguf.GGUFReader(write_gguf(folder / "plain.gguf", folder / "hf", "float32")).tensors
    stored = {}
    for number, tensor in enumerate(names):
        if len(tensor.shape) > 1:
            shape = tuple(int(size) for size in tensor.shape[::-1])
            stored[tensor.name] = drawn_blocks(kinds[number % len(kinds)], shape, number)
    file = write_gguf(folder / "x.gguf", folder / "hf", stored=stored)
    plain = {
        name: (quants.dequantize(*blocks), GGMLQuantizationType.F32)
        for name, blocks in stored.items()
    }
    write_gguf(folder / "wide.gguf", folder / "hf", "float32", stored=plain)
    return file


def _mean_error(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Return the mean difference over the mean magnitude of all logits."""
    ones, others = torch.cat(logits).float(), torch.cat(exact)
    return float((ones - others).abs().mean() / others.abs().mean())


@pytest.mark.parametrize(
    "kinds",
    [
        *([kind] for kind in sorted(QUANTIZED_TYPES)),
        sorted(QUANTIZED_TYPES),
        [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.F16],
    ],
    ids=lambda kinds: "-".join(kind.name for kind in kinds[:3]) + f"-{len(kinds)}",
)
def test_quantized_weights_give_the_logits_of_their_wide_values(
    tmp_path: Path, kinds: list[GGMLQuantizationType]
) -> None:
    folder = checkpoint_folder(write_quantized(tmp_path, kinds))
    wide = checkpoint_folder(tmp_path / "wide.gguf")
    exact = logits_of(runner_of(wide), CHUNKS)
    widened = EngineConfig(num_blocks=32, dtype="float32", device="cpu", kernels="torch")
    for one, other in zip(logits_of(runner_of(folder, widened), CHUNKS), exact, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
    stored = EngineConfig(num_blocks=32, device="cpu")
    rounded = EngineConfig(num_blocks=32, device="cpu", dtype="bfloat16", kernels="torch")
    # As near as the wide weights rounded to bfloat16, since codes are computed exactly.
    error = _mean_error(logits_of(runner_of(folder, stored), CHUNKS), exact)
    assert error <= 1.5 * _mean_error(logits_of(runner_of(wide, rounded), CHUNKS), exact)


def test_mixed_types_keep_a_step_in_one_call(tmp_path: Path) -> None:
    folder = checkpoint_folder(write_quantized(tmp_path, sorted(QUANTIZED_TYPES)))
    config = EngineConfig(num_blocks=32, device="cpu")
    if resolve(folder, config).kernels != "native":
        pytest.skip("this machine cannot compile the kernels")
    assert runner_of(folder, config).is_row_exact


def test_a_model_in_several_files(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "Llama")
    whole = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "float32"))
    first = write_gguf(tmp_path / "many.gguf", tmp_path / "hf", "float32", tensors_a_file=9)
    folder = checkpoint_folder(first)
    assert len(gguf_parts(folder)) > 2
    for one, other in zip(
        logits_of(runner_of(folder), CHUNKS), logits_of(runner_of(whole), CHUNKS), strict=True
    ):
        assert torch.equal(one, other)


def test_quantization_of_such_a_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "Llama", hidden_size=96, intermediate_size=96)
    folder = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "q8_0"))
    with pytest.raises(ConfigError, match="is quantized already, by GGUF"):
        Engine.load(folder, EngineConfig(num_blocks=32, device="cpu", quantization="int8"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, r"Tensor model\.layers\.3\.input_layernorm\.weight is missing"),
        ({"num_hidden_layers": 2}, r"holds 9 tensors that config\.json does not account for"),
        ({"intermediate_size": 96}, r"Tensor blk\.0\.ffn_gate\.weight in .*x\.gguf has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    saved(tmp_path / "hf", "Llama")
    file = write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "float32")
    folder = checkpoint_folder(file)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=words):
        runner_of(folder)


def test_a_file_cut_after_its_folder_was_made(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "Llama")
    file = write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "float32")
    folder = checkpoint_folder(file)
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"x\.gguf is truncated: tensor '\S+' ends"):
        runner_of(folder)


def test_a_type_without_a_reader_is_left_to_llama_cpp(tmp_path: Path) -> None:
    saved(tmp_path / "hf", "Llama", **_K_WIDTHS)
    kind = GGMLQuantizationType.IQ2_XXS
    blocks = np.zeros((256, GGML_QUANT_SIZES[kind][1]), np.uint8)
    stored = {"blk.1.attn_q.weight": (blocks, kind)}
    folder = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", stored=stored))
    assert why_not_own(folder) == "its tensor blk.1.attn_q.weight is stored as IQ2_XXS"
    reason = re.escape("blk.1.attn_q.weight is stored as IQ2_XXS. Start it with --engine llamacpp")
    with pytest.raises(CheckpointError, match=reason):
        read_model_config(folder)


def test_slices_of_rows_are_in_the_checkpoints_order(tmp_path: Path) -> None:
    folder = checkpoint_folder(write_quantized(tmp_path, [GGMLQuantizationType.Q5_K]))
    tensors = GgufTensors(gguf_parts(folder), read_model_config(folder))
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = tensors.load_quantized(name, (256, 256), None).values()
    part = tensors.load_quantized(name, (256, 256), range(64, 192)).values()
    assert torch.equal(part, whole[64:192])


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_device_kernels_compute_such_files(tmp_path: Path, kernels: str) -> None:
    """The kernels are Triton's, in its interpreter. The model is minimal, since that is slow."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    saved(tmp_path / "hf", "Llama", num_hidden_layers=1, **sizes)
    folder = checkpoint_folder(write_gguf(tmp_path / "x.gguf", tmp_path / "hf", "q4_1"))
    answers = []
    for settings in ({"kernels": kernels, "cuda_graphs": False}, {"kernels": "torch"}):
        config: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 16}
        engine = Engine.load(folder, msgspec.convert(config | settings, EngineConfig))
        engine.add(request("greedy", [1, 2, 3, 4, 5], max_tokens=4))
        answers.append(tokens_by_request(drain(engine)))
    assert answers[0] == answers[1]
