"""``millrace generate`` with grammars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from tests.support.engine.checkpoints_made import write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

_MONTH = "[0-9]{4}-[0-9]{2}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def generate(folder: Path, checkpoint: Path, *lines: dict[str, Any]) -> tuple[int, list[Any]]:
    """The exit code and the answers."""
    requests, answers = folder / "in.jsonl", folder / "out.jsonl"
    requests.write_text("\n".join(map(json.dumps, lines)))
    code = main(
        [
            *("generate", "--model", str(checkpoint), "--input", str(requests)),
            *("--output", str(answers), "--kv-cache-bytes", "2000000", "--threads", "1"),
        ]
    )
    if not answers.exists():
        return code, []
    return code, [json.loads(line) for line in answers.read_text().splitlines()]


def test_answers_are_held_to_a_grammar(tmp_path: Path, checkpoint: Path) -> None:
    asked = {"prompt": "a mill", "max_tokens": 60, "seed": 3}
    month = {"kind": "regex", "text": _MONTH}
    code, answers = generate(
        tmp_path,
        checkpoint,
        {"id": "month", "n": 2, "grammar": month} | asked,
        {"id": "bad", "grammar": {"kind": "regex", "text": "("}} | asked,
        {"id": "stopped", "grammar": {"kind": "regex", "text": "[ab]{3}-c{50}"}, "stop": "-"}
        | asked,
        {"id": "free"} | asked | {"max_tokens": 3, "ignore_eos": True},
    )
    assert code == 1, "one has failed"
    months, bad, stopped, free = answers
    for choice in months["choices"]:
        assert re.fullmatch(_MONTH, choice["text"])
        assert choice["finish_reason"] == "stop"
    assert bad["error"]["code"] == "grammar_invalid"
    assert re.fullmatch("[ab]{3}", stopped["text"])
    assert stopped["finish_reason"] == "stop"
    assert free["completion_tokens"] == 3


@pytest.mark.parametrize(
    "grammar", [{"kind": "xml"}, {"kind": "regex"}, {"kind": "json_object", "text": "x"}]
)
def test_what_is_no_grammar_is_a_bad_line(
    tmp_path: Path, checkpoint: Path, grammar: dict[str, Any]
) -> None:
    assert generate(tmp_path, checkpoint, {"prompt": "a mill", "grammar": grammar}) == (2, [])
