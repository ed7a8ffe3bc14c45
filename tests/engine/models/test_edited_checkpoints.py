"""Checkpoints whose files were edited by hand: computed as transformers does, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import reference_logits, save_llama
from tests.engine.support import drain, prompt, request, tokens_by_request

NUM_TOKENS = 40
PROMPT = prompt(3, 30, 199)


def edit_config(path: Path, **changes: Any) -> None:
    """Set fields of config.json; ``...`` removes one."""
    file = path / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


def completion(path: Path) -> list[int]:
    """Return our greedy completion."""
    engine = Engine.load(path, EngineConfig(num_blocks=80, device="cpu"))
    engine.add(request("a", PROMPT, max_tokens=NUM_TOKENS))
    return tokens_by_request(drain(engine))["a"]


def reference_completion(path: Path) -> list[int]:
    """Return the greedy completion by transformers, from the same folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    token_ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(PROMPT) :]


@pytest.mark.parametrize(
    "changes",
    [
        # As people stretch a new checkpoint by an old recipe.
        {
            "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
            "rope_theta": 5e4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        {"rope_scaling": {"type": "linear", "factor": 3.0, "rope_theta": 1e4}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_scaling_beside_rope_parameters(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_llama(tmp_path)
    plain = completion(tmp_path)
    edit_config(tmp_path, **changes)
    tokens = completion(tmp_path)
    assert tokens == reference_completion(tmp_path)
    assert tokens != plain


def test_another_head_beside_tied_embeddings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    tied = completion(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.flip(tensors["model.embed_tokens.weight"], [0]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = completion(tmp_path)
    assert tokens == reference_completion(tmp_path)
    assert tokens != tied
    assert "tie_word_embeddings" in caplog.text
