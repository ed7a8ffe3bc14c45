"""System of small models, made here, for tests of each kind of model."""

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
    """Write small models and return their folders by name.

    They are an embedder, a model that generates tokens, a cross-encoder, a classifier, and one
    model for each of several tool-call formats, named after the format.
    """
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
    """Run a system with one worker per model, numbered in the models' order."""
    models = [part for path in small_models.values() for part in ("--model", str(path))]
    data = tmp_path_factory.mktemp("small")
    # Seven engines start at a time.
    running = System(data, ("--port", "0", *models), starts_within_s=300.0).start()
    yield running
    assert running.stop() == 0
