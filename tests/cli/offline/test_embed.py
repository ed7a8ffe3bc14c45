"""``millrace embed`` on a tiny checkpoint, with and without sentence-transformers' files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.engine.checkpoints_made import write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [{"id": "a", "text": "mill wheel"}, {"text": "water"}, {"prompt_token_ids": [5, 6, 7]}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


def embed(
    checkpoint: Path, lines: Sequence[Any], *options: str
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the answers."""
    folder = checkpoint.parent
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "in.jsonl").write_text(text)
    out = folder / "out.jsonl"
    out.unlink(missing_ok=True)
    code = main(
        [
            *("embed", "--model", str(checkpoint), "--input", str(folder / "in.jsonl")),
            *("--output", str(out), "--threads", "1", *options),
        ]
    )
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def length(answer: dict[str, Any]) -> float:
    return math.hypot(*answer["embedding"])


def test_texts_are_embedded_in_order(checkpoint: Path) -> None:
    code, answers = embed(checkpoint, [*TEXTS, ""], "--pooling", "mean", "--max-batch", "1")
    assert code == 0
    assert [answer["id"] for answer in answers] == ["a", 2, 3]
    num_tokens = len(Tokenizer.load(checkpoint).encode("mill wheel"))
    assert [answer["prompt_tokens"] for answer in answers[::2]] == [num_tokens, 3]
    assert all(len(answer["embedding"]) == 32 for answer in answers)
    assert not any(math.isclose(length(answer), 1.0, abs_tol=1e-3) for answer in answers)
    _, together = embed(checkpoint, TEXTS, "--pooling", "mean", "--normalize")
    for one, other in zip(answers, together, strict=True):
        assert math.isclose(length(other), 1.0, rel_tol=1e-6)
        scaled = [value / length(one) for value in one["embedding"]]
        assert other["embedding"] == pytest.approx(scaled, abs=1e-5)


def test_to_stdout(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint.parent / "in.jsonl"
    file.write_text(json.dumps(TEXTS[0]))
    arguments = ["embed", "--model", str(checkpoint), "--input", str(file), "--threads", "1"]
    assert main([*arguments, "--pooling", "last"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "a"


def sentence_files(checkpoint: Path, modules: list[str], pooling: dict[str, Any]) -> None:
    """sentence-transformers' files."""
    paths = {"Transformer": "", "Pooling": "pool", "Normalize": "2_Normalize", "Dense": "3_Dense"}
    listed = [
        {"idx": i, "name": str(i), "path": paths[m], "type": f"sentence_transformers.models.{m}"}
        for i, m in enumerate(modules)
    ]
    (checkpoint / "modules.json").write_text(json.dumps(listed))
    (checkpoint / "pool").mkdir()
    (checkpoint / "pool" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("pooling", "chosen"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_checkpoint_sets_pooling_and_normalization(
    checkpoint: Path, pooling: dict[str, Any], chosen: str
) -> None:
    _, asked = embed(checkpoint, TEXTS, "--pooling", chosen, "--normalize")
    sentence_files(checkpoint, ["Transformer", "Pooling", "Normalize"], pooling)
    code, answers = embed(checkpoint, TEXTS)
    assert code == 0
    assert answers == asked
    _, raw = embed(checkpoint, TEXTS, "--no-normalize")
    assert not math.isclose(length(raw[0]), 1.0, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("modules", "pooling", "word"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "pooling_mode"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "exactly one",
        ),
        (["Transformer", "Pooling"], {}, "none"),
    ],
)
def test_a_checkpoint_that_asks_for_more_is_refused(
    checkpoint: Path,
    modules: list[str],
    pooling: dict[str, Any],
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence_files(checkpoint, modules, pooling)
    assert embed(checkpoint, TEXTS) == (2, [])
    assert word in capsys.readouterr().err


def test_without_a_pooling_the_command_names_its_option(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(checkpoint, TEXTS) == (2, [])
    assert "--pooling" in capsys.readouterr().err


def test_bad_lines_are_named_before_anything_runs(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *({"text": "good"}, {}, {"text": "x", "prompt_token_ids": [1]}, {"text": "x", "a": 1}),
        *("no json", {"prompt_token_ids": [99999]}, {"prompt_token_ids": [1] * 200}),
    ]
    assert embed(checkpoint, lines, "--pooling", "last") == (2, [])
    shown = capsys.readouterr().err
    for number in range(2, 8):
        assert f"line {number}: " in shown
    assert "line 1: " not in shown


def test_bad_lines_are_answered_if_asked(checkpoint: Path) -> None:
    lines = [{}, TEXTS[0], {"id": "b", "prompt_token_ids": [99999]}, "no json", TEXTS[1]]
    code, answers = embed(checkpoint, lines, "--pooling", "last", "--answer-bad-lines")
    assert code == 1
    assert [answer["id"] for answer in answers] == [1, "a", "b", 4, 5]
    assert ["error" in answer for answer in answers] == [True, False, True, True, False]
    assert answers[2]["error"]["code"] == "invalid_parameter"
    assert "token ids go from 0" in answers[2]["error"]["message"]
    _, alone = embed(checkpoint, TEXTS[:2], "--pooling", "last")
    assert [answers[1]["embedding"], answers[4]["embedding"]] == [a["embedding"] for a in alone]
