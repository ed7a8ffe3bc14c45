"""One system of small models, made here, for the tests of what each kind of model is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.schemas.tools import ToolFormat
from tests.registry.tool_formats.templates import FAMILIES
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.system import System

TOOL_FORMATS = (ToolFormat.MISTRAL, ToolFormat.QWEN3_CODER, ToolFormat.DEEPSEEK_V31)


@pytest.fixture(scope="package")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: one that makes embeddings only and one that makes tokens, a cross-encoder, a
    classifier, and one for each of some formats of calls, by the format's name."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        "embedder": write_checkpoint(folder / "embedder", architectures=["LlamaModel"]),
        "writer": write_checkpoint(folder / "writer"),
        "ranker": write_checkpoint(
            folder / "ranker",
            architectures=["LlamaForSequenceClassification"],
            num_labels=1,
        ),
        "labeller": write_checkpoint(
            folder / "labeller",
            architectures=["LlamaForSequenceClassification"],
            num_labels=3,
            id2label={"0": "bad", "1": "good", "2": "odd"},
        ),
    }
    for tool_format in TOOL_FORMATS:
        source, specials = FAMILIES[tool_format]
        models[tool_format.value] = write_checkpoint(
            folder / tool_format.value,
            chat_template=source,
            special_tokens=specials,
            max_position_embeddings=4_096,
        )
    return models


@pytest.fixture(scope="package")
def small(
    small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """Each has a worker, numbered in their order."""
    models = [part for path in small_models.values() for part in ("--model", str(path))]
    data = tmp_path_factory.mktemp("small")
    # Seven engines start at a time.
    running = System(data, ("--port", "0", *models), starts_within_s=300.0).start()
    yield running
    assert running.stop() == 0
