"""Model over several ranks: it computes the same as on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine.kernels.gpu import experts as triton_experts
from millrace.engine.kernels.gpu.kernel_set import ExpertKernels
from millrace.engine.kernels.gpu.reference import experts as reference_experts
from millrace.engine.kernels.gpu.reference.operations import swiglu
from millrace.engine.models.decoder import DecoderWeights
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.linears import PackedProjection, Projection
from millrace.engine.models.stacked_experts import StackedExperts, stacked_experts
from millrace.registry.checkpoints.shard import Shard
from millrace.schemas.errors import CheckpointError
from tests.engine.checkpoints import save_model
from tests.engine.kernels.compiled import compiled
from tests.engine.models.ranks import CPU, PROMPTS, ThreadCollectives, logits_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
TOLERANCE = 1e-4
RANKS = pytest.mark.parametrize("size", [2, 4])

CASES: list[Any] = [
    pytest.param("Llama", {}, id="llama"),
    pytest.param("Llama", {"num_key_value_heads": 2}, id="replicated-key-heads"),
    pytest.param("Llama", {"num_key_value_heads": 1}, id="one-key-head"),
    pytest.param("Llama", {"tie_word_embeddings": True}, id="tied"),
    pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, id="biases"),
    pytest.param("Llama", {"vocab_size": 200}, id="another-vocabulary"),
    pytest.param("Qwen2", {}, id="qwen2-biases"),
    pytest.param("Qwen3", {}, id="qwen3-head-norms"),
    pytest.param("Mistral", {"sliding_window": 7}, id="mistral-windows"),
]


@RANKS
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_dense_models(tmp_path: Path, family: str, changes: dict[str, Any], size: int) -> None:
    save_model(tmp_path, family, **(SIZES | changes))
    same_logits(logits_of(tmp_path, size=size), logits_of(tmp_path))


@RANKS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Mixtral", {}, id="mixtral"),
        pytest.param("Qwen3Moe", {"decoder_sparse_step": 2}, id="qwen3-moe-beside-dense"),
        pytest.param("Qwen3Moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, id="one"),
    ],
)
def test_mixtures(
    tmp_path: Path, family: str, changes: dict[str, Any], size: int, splits_experts: bool
) -> None:
    save_model(tmp_path, family, **(SIZES | EXPERTS | changes))
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts)
    same_logits(ours, logits_of(tmp_path))


def same_logits(ours: torch.Tensor, whole: torch.Tensor) -> None:
    assert ours.shape == whole.shape
    assert float((ours - whole).abs().max() / whole.abs().max()) <= TOLERANCE


def test_one_sum_for_the_embedding_and_for_each_half_of_a_layer(tmp_path: Path) -> None:
    save_model(tmp_path, "Mixtral", **(SIZES | EXPERTS))
    groups: list[ThreadCollectives] = []

    def change(weights: DecoderWeights, shard: Shard) -> DecoderWeights:
        groups.append(weights.layers[0].output.collectives)  # type: ignore[attr-defined]
        return weights

    logits_of(tmp_path, size=2, change=change)
    num_steps = 2
    assert [group.num_calls for group in groups] == [num_steps * (1 + 2 * 3)] * 2


@pytest.mark.parametrize(("size", "unused"), [(2, 111), (2, 112), (4, 63), (4, 128)])
def test_an_embedding_that_is_not_finite_is_of_its_own_token_alone(
    tmp_path: Path, size: int, unused: int
) -> None:
    """The embedding is a rank's first or last, which the rank reads in place of other ranks'
    tokens."""
    assert not any(unused in one for one in PROMPTS)
    save_model(tmp_path, "Llama", nan_token=unused, **SIZES)
    same_logits(logits_of(tmp_path, size=size), logits_of(tmp_path))


@RANKS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
def test_random_weights_are_those_of_one_rank(
    tmp_path: Path, size: int, splits_experts: bool
) -> None:
    save_model(tmp_path, "Qwen3Moe", **(SIZES | EXPERTS | {"decoder_sparse_step": 2}))
    source = partial(DummyTensors, torch.float32, CPU)
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts, source=source)
    same_logits(ours, logits_of(tmp_path, source=source))


@RANKS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_bfloat16(tmp_path: Path, size: int, splits_experts: bool, is_packed: bool) -> None:
    """A sum over ranks is rounded once for each rank and once more, so the error grows little."""
    save_model(tmp_path, "Mixtral", **(SIZES | EXPERTS))
    makers: dict[str, Any] = {"dtype": torch.bfloat16}
    if is_packed:
        makers["product"] = partial(PackedProjection.of_wide, compiled(torch.bfloat16))
    exact = logits_of(tmp_path)
    whole = logits_of(tmp_path, **makers).float()
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts, **makers).float()
    # Where two experts are as likely, another of them may be chosen: medians.
    error = (ours - exact).norm(dim=-1).median()
    assert float(error) <= 1.5 * float((whole - exact).norm(dim=-1).median())


@RANKS
@pytest.mark.parametrize("splits_experts", [False, True], ids=["slices", "whole-experts"])
def test_stacks_of_experts(tmp_path: Path, size: int, splits_experts: bool) -> None:
    """The experts are stacked as on a device."""
    save_model(tmp_path, "Mixtral", **(SIZES | EXPERTS))
    make = stacked_experts(reference_experts, Projection, fixed=False)
    ours = logits_of(tmp_path, size=size, splits_experts=splits_experts, experts=make)
    same_logits(ours, logits_of(tmp_path))


@pytest.mark.parametrize("kernels", [reference_experts, triton_experts], ids=["torch", "triton"])
def test_parts_of_a_mixture_make_the_whole(kernels: ExpertKernels) -> None:
    """Experts that the kernels leave out of a part add nothing; Triton's kernels are
    interpreted."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mixture(own: slice) -> StackedExperts:
        return StackedExperts(
            router=Projection(router, None),
            gate_up=gate_up[own],
            down=down[own],
            num_chosen=2,
            normalized=True,
            kernels=kernels,
            fixed=False,
        )

    router, gate_up, down, rows = drawn(6, 32), drawn(6, 64, 32), drawn(6, 32, 32), drawn(9, 32)
    whole = mixture(slice(6)).plus(torch.zeros(9, 32), rows, swiglu)
    total = torch.zeros(9, 32)
    for begin in (0, 2, 4):
        part = mixture(slice(begin, begin + 2))._replace(first_expert=begin, is_part=True)
        total += part.plus(torch.zeros(9, 32), rows, swiglu)
    torch.testing.assert_close(total, whole, atol=1e-3, rtol=1e-4)


def test_tensors_are_checked_as_those_of_the_whole_model(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", **SIZES)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file(tensors | {name: torch.zeros(64, 96)}, file)
    with pytest.raises(CheckpointError, match=r"o_proj.*\[64, 96\].*\[64, 128\]"):
        logits_of(tmp_path, size=2)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=name):
        logits_of(tmp_path, size=2)


def test_experts_of_other_ranks_are_no_tensors_too_many(tmp_path: Path) -> None:
    save_model(tmp_path, "Mixtral", **(SIZES | EXPERTS))
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.0.block_sparse_moe.experts.4.w1.weight": torch.zeros(1)}
    save_file(load_file(file) | extra, file)
    with pytest.raises(CheckpointError, match=r"1 tensors .*experts\.4\.w1"):
        logits_of(tmp_path, size=2, splits_experts=True)
