"""Errors of ``LLM`` before any part of a call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.engine import LLM, Grammar, SamplingParams
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    MillraceError,
    ModelNotFoundError,
    ParameterError,
)
from tests.engine.test_llm import SMALL, classifier
from tests.support.adapters import write_adapter
from tests.support.engine.checkpoints_made import write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment, which LLM sets for its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **SMALL) as made:
        yield made


@pytest.mark.parametrize(
    ("settings", "kind", "word"),
    [
        ({"model": "no/such/folder/at/all"}, ModelNotFoundError, "no/such/folder/at/all"),
        ({"model": Path("no/such")}, ModelNotFoundError, "does not exist"),
        ({"model": "/tmp"}, CheckpointError, "has no config.json"),
        ({"quantization": "int3"}, ConfigError, "quantization is 'int3'; choose"),
        ({"tensor_parallel": 0}, ConfigError, "needs at least 1 device"),
        ({"colour": "red"}, ConfigError, "There is no setting colour"),
        ({"num_blocks": "many"}, ConfigError, "num_blocks"),
        ({"device": "abacus"}, ConfigError, "abacus"),
        ({"max_num_sequences": -1}, ConfigError, "max_num_sequences"),
        ({"catalogue": "/no/models.yaml"}, ConfigError, "models.yaml cannot be read"),
        ({"adapters": {"sql": "/no/where"}}, AdapterError, "cannot be found"),
        ({"adapters": {"a/b": "/no/where"}}, ParameterError, "An adapter's name"),
        (
            {"config": EngineConfig(), "dtype": "auto"},
            ConfigError,
            "config has all settings; leave dtype out",
        ),
        ({"quantization": "int8", "config": EngineConfig()}, ConfigError, "leave quantization out"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else None,
)
def test_a_model_that_cannot_be_loaded(
    checkpoint: Path, settings: dict[str, Any], kind: type[MillraceError], word: str
) -> None:
    with pytest.raises(kind, match=word):
        LLM(**{"model": checkpoint} | settings)


BAD_CALLS: dict[str, tuple[Callable[[LLM], object], type[MillraceError], str]] = {
    "no prompts": (lambda llm: llm.generate([]), ParameterError, "prompts must not be empty"),
    "empty prompt": (lambda llm: llm.generate(["x", ""]), ParameterError, "must not be empty"),
    "no text": (lambda llm: llm.generate([{"x": 1}]), ParameterError, "must be a text"),  # type: ignore[arg-type]
    "a number": (lambda llm: llm.generate(7), ParameterError, "must be a text"),  # type: ignore[arg-type]
    "no such token": (lambda llm: llm.generate([99_999]), ParameterError, "token id 99999"),
    "too long": (lambda llm: llm.generate("mill " * 999), ContextLengthError, "128 tokens"),
    "no room": (
        lambda llm: llm.generate("mill", SamplingParams(max_tokens=999)),
        ContextLengthError,
        "999 in the completion",
    ),
    "too few parameters": (
        lambda llm: llm.generate(["a", "b"], [SamplingParams()]),
        ParameterError,
        "one for each of 2",
    ),
    "other parameters": (
        lambda llm: llm.generate("a", {"temperature": 0}),  # type: ignore[arg-type]
        ParameterError,
        "sampling_params must be one SamplingOptions",
    ),
    "a bad type": (
        lambda llm: llm.generate("a", SamplingParams(ignore_eos="no")),  # type: ignore[arg-type]
        ParameterError,
        "ignore_eos",
    ),
    "unknown adapter": (
        lambda llm: llm.generate("a", adapter="sql"),
        ParameterError,
        "There is no adapter 'sql'",
    ),
    "no messages": (lambda llm: llm.chat([]), ParameterError, "messages must be a list"),
    "a text as a chat": (lambda llm: llm.chat("hi"), ParameterError, "messages must be a list"),  # type: ignore[arg-type]
    "another role": (
        lambda llm: llm.chat([{"role": "wizard", "content": "x"}]),
        ParameterError,
        "wizard",
    ),
    "no tools": (
        lambda llm: llm.chat([{"role": "user", "content": "x"}], tool_choice="required"),
        ParameterError,
        "there are no tools",
    ),
    "stream of nothing": (lambda llm: llm.stream([]), ParameterError, "must not be empty"),
    "unknown pooling": (
        lambda llm: llm.embed("a", pooling="max"),  # type: ignore[arg-type]
        ParameterError,
        "pooling must be last or mean",
    ),
    "no labels": (lambda llm: llm.classify("a"), ParameterError, "no classification head"),
    "no documents": (lambda llm: llm.score("a", []), ParameterError, "documents must be"),
    "two for three": (
        lambda llm: llm.score(["a", "b"], ["c", "d", "e"]),
        ParameterError,
        "got 2 and 3",
    ),
    "an empty choice": (
        lambda llm: llm.generate("a", SamplingParams(grammar=Grammar.choice([]))),
        ParameterError,
        "choice must have 1 to",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_that_cannot_be_run(llm: LLM, name: str) -> None:
    call, kind, word = BAD_CALLS[name]
    with pytest.raises(kind, match=word):
        call(llm)
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_an_error_says_at_which_prompt(llm: LLM) -> None:
    for call, place in (
        (lambda: llm.generate(["x", ""]), "prompts[1]"),
        (lambda: llm.score(["x"], ["y", ""]), "documents[1]"),
        (lambda: llm.score([""], ["y"]), "queries[0]"),
    ):
        with pytest.raises(ParameterError) as caught:
            call()
        assert caught.value.__notes__ == [f"at {place}"]


def test_a_model_makes_what_it_has_a_head_for(tmp_path: Path) -> None:
    with LLM(classifier(tmp_path / "labels", 3), **SMALL) as llm:
        for call, word in (
            (lambda: llm.generate("a"), "makes labels of texts only, no completions"),
            (lambda: llm.embed("a"), "makes labels of texts only, no embeddings"),
            (lambda: llm.score("a", "b"), "into 3 labels and cannot score pairs"),
        ):
            with pytest.raises(ParameterError, match=word):
                call()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    other = write_checkpoint(tmp_path / "other", hidden_size=64)
    adapter = write_adapter(tmp_path / "sql", read_model_config(other))
    with pytest.raises(AdapterError, match="the adapter is of another model"):
        LLM(checkpoint, adapters={"sql": adapter}, **SMALL)
