"""``millrace quantize``: from a wide checkpoint to a quantized one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")

LINES: list[dict[str, Any]] = [
    {"text": "the mill race feeds the wheel", "source": "a book"},
    {"prompt": "tell me of wheels"},
    {"messages": [{"role": "user", "content": "race?"}, {"role": "assistant", "content": "water"}]},
]


def quantize(model: Path | str, output: Path, scheme: str, *options: str) -> int:
    return main(
        [
            *("quantize", "--model", str(model), "--output", str(output), "--scheme", scheme),
            *("--threads", "1", "--device", "cpu", *options),
        ]
    )


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "texts.jsonl"
    file.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return file


@pytest.mark.parametrize(
    ("scheme", "stored"),
    [
        ("w8a8-int8", {"weight": torch.int8, "weight_scale": torch.float32}),
        ("w8a8-fp8", {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}),
        (
            "w4a16",
            {
                "weight_packed": torch.int32,
                "weight_scale": torch.float32,
                "weight_shape": torch.int64,
            },
        ),
    ],
)
def test_a_checkpoint_is_written(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    scheme: str,
    stored: dict[str, torch.dtype],
) -> None:
    assert quantize(checkpoint, tmp_path / "made", scheme, "--group", "32") == 0
    assert f"14 linear maps in {scheme}" in capsys.readouterr().err
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    module = "model.layers.1.mlp.down_proj."
    found = {name: tensors[name].dtype for name in tensors if name.startswith(module)}
    assert found == {module + name: dtype for name, dtype in stored.items()}
    beside = {file.name for file in checkpoint.iterdir()}
    assert {file.name for file in (tmp_path / "made").iterdir()} == beside


def test_texts_of_each_kind_calibrate(tmp_path: Path, checkpoint: Path) -> None:
    assert quantize(checkpoint, tmp_path / "nearest", "w4a16") == 0
    made = []
    for name, lines, options in (
        ("all", LINES, ()),
        ("two", LINES, ("--samples", "2")),
        ("the_two", LINES[:2], ()),
    ):
        file = written(tmp_path, *lines)
        options = ("--calibrate", str(file), *options)
        assert quantize(checkpoint, tmp_path / name, "w4a16", *options) == 0
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[1] == made[2] != made[0]
    assert (tmp_path / "nearest" / "model.safetensors").read_bytes() not in made


def test_lines_that_are_no_text_are_named_by_number(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path,
        LINES[0],
        "",
        "{",
        {"text": "a", "prompt": "b"},
        {"id": 3},
        {"messages": [{"role": "miller"}]},
    )
    assert quantize(checkpoint, tmp_path / "made", "w4a16", "--calibrate", str(file)) == 2
    errors = capsys.readouterr().err
    for number in (3, 4, 5, 6):
        assert f"texts.jsonl, line {number}: " in errors
    assert "line 1:" not in errors
    assert "one of text, prompt and messages" in errors
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--group", "100"), "multiple of 32 inputs, got 100"),
        (("--samples", "0"), "--samples must be at least 1"),
        (("--threads", "-1"), "--threads must be at least 0"),
        (("--calibrate", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("--device", "abacus"), "choose auto, cpu or cuda"),
        (("--scheme", "w8a8-fp8", "--calibrate", "EMPTY"), "w8a8-fp8 needs no calibration"),
        (("--calibrate", "EMPTY"), "no tokens"),
        (("--model", "./nowhere"), "nowhere does not exist"),
        (("--model", "wheat.gguf"), "is a GGUF file; name the wide checkpoint"),
        (("--output", "."), "is not empty"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "wheat.gguf").write_text("GGUF")
    assert quantize(checkpoint, tmp_path / "made", "w4a16", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_folder_that_one_is_in_may_be_named_by_a_dot(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    monkeypatch.chdir(tmp_path / "made")
    assert quantize(checkpoint, Path(), "w8a8-int8") == 0
    assert (tmp_path / "made" / "model.safetensors").is_file()


def test_a_quantized_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(checkpoint, tmp_path / "made", "w8a8-int8") == 0
    assert quantize(tmp_path / "made", tmp_path / "again", "w4a16") == 2
    assert "the weights are quantized already" in capsys.readouterr().err
