"""``LLM`` over GGUF files: tokens, adapters and drafts as over their source checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.engine import LLM, SamplingParams
from millrace.engine.scheduling.cost_model import CostModel
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.gguf import checkpoint_folder as folders
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.support.adapters import write_adapter
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.gguf_made import write_metadata
from tests.support.gguf_files import write_gguf

_SMALL: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 64}
_PROMPTS = ["mill wheel", "water"]
_GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment, which LLM sets for its process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128}
    return write_checkpoint(tmp_path / "tiny", **sizes)


def tokens_of(model: Path, **settings: Any) -> list[tuple[int, ...]]:
    with LLM(model, **(_SMALL | settings)) as llm:
        return [tuple(output.token_ids) for output in llm.generate(_PROMPTS, _GREEDY)]


def test_tokens_and_adapters_are_those_of_the_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", checkpoint, "float32")
    assert tokens_of(file) == tokens_of(checkpoint)
    adapter = write_adapter(tmp_path / "sql", read_model_config(checkpoint))
    answers = []
    for model in (file, checkpoint):
        with LLM(model, adapters={"sql": adapter}, **_SMALL) as llm:
            outputs = llm.generate(_PROMPTS, _GREEDY, adapter="sql")
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_draft_may_be_a_file(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small model's steps take as long as Python does, so nothing would be drafted.
    monkeypatch.setattr(CostModel, "is_warm", property(lambda _: False))
    target = write_gguf(tmp_path / "target.gguf", checkpoint, "q8_0")
    draft = write_gguf(tmp_path / "draft.gguf", checkpoint, "q8_0")
    expected = tokens_of(target, speculation="off")
    with LLM(target, speculation=f"draft={draft}", **_SMALL) as llm:
        outputs = llm.generate(_PROMPTS, _GREEDY)
        assert [tuple(output.token_ids) for output in outputs] == expected
        if llm.engine.config.kernels == "native":
            assert llm.engine.stats().accepted_tokens > 0


def test_quantization_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", checkpoint, "q8_0")
    with pytest.raises(ConfigError, match="int8 is not for GGUF files, whose weights are computed"):
        LLM(file, quantization="int8", **_SMALL)


def test_a_file_for_llama_cpp_is_named_with_the_reason(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="LLM cannot compute: its architecture is tiny"):
        LLM(file, **_SMALL)
