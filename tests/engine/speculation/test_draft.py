"""Draft model: it predicts many of its target's tokens, and changes none of them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.step.runners import load_draft, load_runner
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.speculation.test_equality import _load
from tests.engine.speculation.worlds import VOCAB_SIZE, Answers, load, run
from tests.engine.support import prompt, request, resolved


@pytest.fixture(scope="module")
def draft(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a draft: the target with slightly changed weights."""
    path = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(checkpoint, path)
    file = path / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (tensor + 0.004 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        if "layers" in name and tensor.dim() == 2
        else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def known(checkpoint: Path) -> Answers:
    return run(load(checkpoint, "off"), _load(0))


@pytest.fixture(autouse=True)
def _rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows cheap: a small model's steps take as long as Python does, so nothing would be
    drafted."""
    monkeypatch.setattr(CostModel, "is_warm", property(lambda _: False))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_sequences": 4},
        {"num_blocks": 20, "max_batch_tokens": 24},
        {"num_blocks": 16, "host_cache_bytes": 0, "prefix_cache": False},
    ],
)
def test_draft_changes_no_token(
    checkpoint: Path, draft: Path, known: Answers, settings: dict[str, Any]
) -> None:
    gaps = [random.Random(3).randrange(4) for _ in range(26)]
    engine = load(checkpoint, f"draft={draft}", **settings)
    assert run(engine, _load(0), gaps) == known
    stats = engine.stats()
    assert stats.accepted_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_most_draft_tokens_are_accepted_at_any_temperature(
    checkpoint: Path, draft: Path, temperature: float
) -> None:
    engine = load(checkpoint, f"draft={draft}")
    requests = [
        request(f"r{i}", prompt(i, 300, 400), max_tokens=80, temperature=temperature, seed=i)
        for i in range(3)
    ]
    answers = run(engine, requests)
    stats = engine.stats()
    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
    assert stats.accepted_tokens > 0.5 * stats.proposed_tokens > 0.2 * num_tokens
    assert answers == run(load(checkpoint, "off"), requests)


def test_a_draft_that_fails_costs_its_proposals_only(
    checkpoint: Path, draft: Path, known: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(checkpoint, f"draft={draft}")
    assert engine._speculator is not None
    assert engine._speculator._draft is not None
    runner = engine._speculator._draft._runner
    launch, generator = runner.launch, random.Random(2)

    def failing(plan: Any) -> Any:
        if generator.random() < 0.3:
            raise RuntimeError("can't allocate memory")
        return launch(plan)

    monkeypatch.setattr(runner, "launch", failing)
    assert run(engine, _load(0)) == known
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_draft_with_another_vocabulary_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    save_llama(
        tmp_path / "small",
        vocab_size=VOCAB_SIZE - 8,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        max_position_embeddings=2048,
    )
    with pytest.raises(ConfigError, match="a draft with the same vocabulary"):
        load(checkpoint, f"draft={tmp_path / 'small'}")


def test_a_draft_that_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        load(checkpoint, f"draft={tmp_path / 'absent'}")


@pytest.mark.parametrize(
    ("speculation", "is_used"), [(None, True), ("ngram", False), ("off", False)]
)
def test_a_draft_that_comes_with_a_checkpoint_is_used_where_the_settings_leave_it_open(
    checkpoint: Path, draft: Path, tmp_path: Path, speculation: str | None, is_used: bool
) -> None:
    both = tmp_path / "model"
    shutil.copytree(checkpoint, both)
    shutil.copytree(draft, both / "draft")
    how: dict[str, Any] = {
        "num_blocks": 64,
        "device": "cpu",
        "dtype": "bfloat16",
        "kernels": "native",
    }
    settings = resolved(both, **how, speculation=speculation)
    target = load_runner(both, settings)
    assert (load_draft(both, target, settings) is not None) == is_used
    alone = resolved(checkpoint, **how, speculation=speculation)
    assert load_draft(checkpoint, target, alone) is None
