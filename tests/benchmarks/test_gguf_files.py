"""Checkpoints written as GGUF files: the same numbers under llama.cpp's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from benchmarks.checkpoints import LLAMA_100M, write_llama
from millrace.registry.checkpoints.checkpoint import open_tensors
from tests.engine.checkpoints import save_base_model
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.gguf_files import write_gguf

_SMALL = LLAMA_100M._replace(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96, vocab_size=600
)


def test_matrices_are_as_in_the_checkpoint_but_for_the_order_that_rope_asks_for(
    tmp_path: Path,
) -> None:
    folder = write_llama(tmp_path / "llama", _SMALL)
    written = GGUFReader(write_gguf(tmp_path / "llama.gguf", folder, "float32"))
    tensors = {tensor.name: tensor.data for tensor in written.tensors}
    stored = open_tensors(folder)
    assert len(tensors) == len(stored) == 3 + 9 * 2
    down = stored.load("model.layers.1.mlp.down_proj.weight", (64, 96)).float().numpy()
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], down)
    keys = stored.load("model.layers.0.self_attn.k_proj.weight", (32, 64)).float().numpy()
    halves = keys.reshape(2, 2, 8, 64)
    pairs = tensors["blk.0.attn_k.weight"].reshape(2, 8, 2, 64)
    assert np.array_equal(pairs[:, :, 0], halves[:, 0])
    assert np.array_equal(pairs[:, :, 1], halves[:, 1])


def test_matrices_are_bfloat16_and_vectors_are_not(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama", _SMALL)
    written = GGUFReader(write_gguf(tmp_path / "llama.gguf", folder))
    tensors = {tensor.name: tensor for tensor in written.tensors}
    assert tensors["output_norm.weight"].tensor_type == GGMLQuantizationType.F32
    query = tensors["blk.0.attn_q.weight"]
    assert query.tensor_type == GGMLQuantizationType.BF16
    stored = open_tensors(folder).load("model.layers.0.self_attn.q_proj.weight", (64, 64))
    read = torch.from_numpy(query.data.copy()).view(torch.bfloat16)
    assert torch.equal(read[0], stored[0])  # the first row keeps its place


def test_what_is_not_written_is_refused(tmp_path: Path) -> None:
    save_base_model(tmp_path / "base", "Llama")
    with pytest.raises(ValueError, match="LlamaModel"):
        write_gguf(tmp_path / "model.gguf", tmp_path / "base")
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="RoPE scaling dynamic"):
        write_gguf(
            tmp_path / "model.gguf", write_checkpoint(tmp_path / "llama", rope_scaling=scaling)
        )
