"""Outlines of models that other engines compute and Millrace's own does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.registry.catalogue import Catalogue, CatalogueEngine
from millrace.registry.checkpoints.checkpoint import read_model_outline
from millrace.registry.served import outline_of
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import CheckpointError
from tests.support.engine.checkpoints_made import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ],
)
def test_another_engine_may_compute_what_ours_does_not(
    checkpoint: Path, change: dict[str, Any]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | change))
    entry = Catalogue({}).entry_for(str(checkpoint))
    with pytest.raises(CheckpointError):
        outline_of(entry, checkpoint)
    vllm = msgspec.structs.replace(entry, engine=CatalogueEngine(kind=EngineKind.VLLM))
    outline = outline_of(vllm, checkpoint)
    assert outline.vocab_size == config["vocab_size"]
    assert outline.context_window_tokens == config["max_position_embeddings"]


def test_a_section_for_text_is_the_models_own(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    nested = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": config}
    (checkpoint / "config.json").write_text(json.dumps(nested))
    outline = read_model_outline(checkpoint, any_architecture=True)
    assert outline.vocab_size == config["vocab_size"]
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(CheckpointError, match="hidden_size"):
        read_model_outline(checkpoint, any_architecture=True)
