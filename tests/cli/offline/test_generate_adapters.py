"""``millrace generate`` with LoRA adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from millrace.cli.main import main
from tests.cli.offline.generating import generate
from tests.engine.adapters.saved import save_adapter
from tests.engine.checkpoints import reference_greedy

PROMPT = [5, 6, 7, 8, 9, 10]
LINE = {"prompt_token_ids": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_lines_have_the_adapters_that_they_name(tmp_path: Path, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    models = {"": model}
    for seed, name in enumerate(("sql", "poems")):
        models[name] = save_adapter(tmp_path / name, model, seed=seed)
    options = [f"--adapter={name}={tmp_path / name}" for name in ("sql", "poems")]
    lines = [LINE | {"adapter": name} for name in ("sql", "poems", "", "sql")] + [LINE]
    code, answers = generate(tmp_path, checkpoint, lines, *options)
    assert code == 0
    expected = {name: reference_greedy(one, PROMPT, 8) for name, one in models.items()}
    assert [one["token_ids"] for one in answers] == [
        expected[name] for name in ("sql", "poems", "", "sql", "")
    ]
    # What one of them cached of the prompt is not taken by another.
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    # By the runner of GPUs, which has slots for as many as are given.
    lines = [LINE, LINE | {"adapter": ""}]
    _, (alone, base) = generate(tmp_path, checkpoint, lines, options[0], "--kernels=reference")
    assert alone["token_ids"] == expected["sql"]
    assert base["token_ids"] == expected[""]


def test_a_line_with_an_unknown_adapter_is_bad(tmp_path: Path, checkpoint: Path) -> None:
    code, (answer,) = generate(
        tmp_path, checkpoint, [LINE | {"adapter": "x"}], "--answer-bad-lines"
    )
    assert code == 1
    assert answer["error"]["code"] == "invalid_parameter"
    assert "no adapter 'x'" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("sql", "NAME=PATH"),
        ("sql=/nowhere/at/all", "cannot be found"),
        ("auto=/nowhere/at/all", "The adapter name auto is reserved"),
        ("..=/nowhere/at/all", "The adapter name .. is reserved"),
        ("sql={folder}", "adapter_config.json cannot be read"),
    ],
)
def test_a_bad_option_is_told_before_the_engine_starts(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    message: str,
) -> None:
    (tmp_path / "in.jsonl").write_text("")
    arguments = [
        *("generate", "--model", str(checkpoint), "--input", str(tmp_path / "in.jsonl")),
        *("--output", str(tmp_path / "out.jsonl"), "--adapter", option.format(folder=tmp_path)),
    ]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
