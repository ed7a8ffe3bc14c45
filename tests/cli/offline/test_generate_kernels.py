"""``millrace generate`` with the options that choose kernels, weights and memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.offline.generating import generate

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"prompt": "mill wheel", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
DRAWN = {"prompt": "race", "max_tokens": 24, "seed": 3, "top_p": 0.9, "ignore_eos": True}


def test_the_runner_of_a_gpu_answers_the_same(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded steps and overlap, on plain torch kernels, do not change the answers."""
    _, expected = generate(tmp_path, checkpoint, [GREEDY, DRAWN])
    for options in ((), ("--no-cuda-graphs", "--no-overlap")):
        caplog.clear()
        code, answers = generate(
            tmp_path, checkpoint, [GREEDY, DRAWN], "--kernels", "reference", *options
        )
        assert (code, answers) == (0, expected)
        assert "by reference kernels" in caplog.text
        assert ("warmed up in" in caplog.text) == (not options)


def test_keys_and_values_in_eight_bits(tmp_path: Path, checkpoint: Path) -> None:
    options = ("--kernels", "reference", "--kv-cache-dtype", "fp8")
    code, (answer,) = generate(tmp_path, checkpoint, [GREEDY], *options)
    assert (code, answer["completion_tokens"]) == (0, 24)


def test_random_weights(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "no-weights"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    code, (answer,) = generate(tmp_path, folder, [GREEDY], "--load-format", "dummy")
    assert (code, answer["completion_tokens"]) == (0, 24)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_are_quantized_when_they_are_loaded(
    tmp_path: Path, checkpoint: Path, quantization: str
) -> None:
    lines = [GREEDY | {"prompt_logprobs": 0}]
    _, (wide,) = generate(tmp_path, checkpoint, lines)
    code, (answer,) = generate(tmp_path, checkpoint, lines, "--quantization", quantization)
    assert (code, answer["completion_tokens"]) == (0, 24)
    assert answer["prompt_logprobs"] != wide["prompt_logprobs"]
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(
        f"models:\n  tiny:\n    source: {checkpoint}\n    quantization: {quantization}\n"
    )
    _, (as_listed,) = generate(tmp_path, Path("tiny"), lines, "--catalogue", str(catalogue))
    assert as_listed == answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu-memory-fraction", "1.5"), "gpu_memory_fraction must be above 0"),
        (("--kv-cache-dtype", "fp8"), "kernels of a GPU"),
        (("--deterministic",), "kernels of a GPU"),
        (("--speculation", "ngram", "--dtype", "float32"), "compiled kernels of a CPU"),
        (("--speculation", "ngram", "--kernels", "reference"), "compiled kernels of a CPU"),
        (("--load-format", "guess"), "choose auto, dummy"),
        (("--max-batch", "0"), "--max-batch must be at least 1"),
        (("--remote-stages", "1"), "pipeline"),
        (("--remote-stages", "-1"), "remote_stages"),
        (("--stages-token-file", "nowhere"), "--stages-token-file"),
    ],
)
def test_a_bad_option_is_told_in_a_sentence(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    code, _ = generate(tmp_path, checkpoint, [GREEDY], *options)
    assert code != 0
    assert message in capsys.readouterr().err
