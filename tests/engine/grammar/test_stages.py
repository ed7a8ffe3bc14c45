"""Grammars of sequences in a pipeline: a step is read while the next one is in flight."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.frames import FinishReason
from tests.engine.grammar.grammars import (
    WORDS,
    ask,
    load_engine,
    regex,
    run,
    save_checkpoint,
    schema,
)

_SCHEMA = {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 2, "maxItems": 3}


@pytest.mark.parametrize("settings", [{}, {"kernels": "reference"}], ids=str)
def test_a_grammar_holds_beside_a_step_of_others(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Other requests of the step have no grammar, or another one."""
    tokenizer = Tokenizer.load(save_checkpoint(tmp_path))
    engine = load_engine(
        tmp_path, pipeline_parallel=2, num_threads=1, max_num_sequences=8, **settings
    )
    assert engine._runner.num_stages == 2
    answers = run(
        engine,
        tokenizer,
        *(ask(f"words {i}", regex(WORDS), n=1 + i) for i in range(3)),
        *(ask(f"free {i}", None, max_tokens=60) for i in range(2)),
        ask("json", schema(_SCHEMA)),
    )
    for i in range(3):
        for choice in range(1 + i):
            assert answers.reason(f"words {i}", choice) is FinishReason.STOP
            assert re.fullmatch(WORDS, answers.text(f"words {i}", choice))
    jsonschema.validate(json.loads(answers.text("json")), _SCHEMA)
