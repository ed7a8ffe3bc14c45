"""Quality benchmark: its texts, scores, reshaped checkpoints, and what llama.cpp prints."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.quality.__main__ import Result, Row, table
from benchmarks.quality.llamacpp import parsed, write_base
from benchmarks.quality.own import measure_own
from benchmarks.quality.reshaping import write_permuted, write_widened
from benchmarks.quality.scores import Reference, Score
from benchmarks.quality.texts import NUM_COUNTED, WINDOW_TOKENS, windows
from benchmarks.support.processes import in_new_process
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.demo import MODEL_DIR
from millrace.registry.tokenizers.tokenizer import Tokenizer

_SHAPE = LlamaShape(
    hidden_size=576,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    intermediate_size=128,
    vocab_size=640,
)
# The end of what llama-perplexity of llama-cpp-python 0.3.36 printed for SmolLM2 in Q8_0.
_PRINTED = """
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   4      10.9073 ±    1.0527       0.00223 ±    0.00311       0.00408 ±    0.00015     1.741 ±  0.079 %    96.961 ±  0.538 %

====== Perplexity statistics ======
Mean PPL(Q)                   :  10.907275 ±   1.052731
Mean PPL(base)                :  10.883004 ±   1.050742
Cor(ln(PPL(Q)), ln(PPL(base))):  99.95%
Mean ln(PPL(Q)/PPL(base))     :   0.002228 ±   0.003108
Mean PPL(Q)/PPL(base)         :   1.002230 ±   0.003115
Mean PPL(Q)-PPL(base)         :   0.024271 ±   0.033922

====== KL divergence statistics ======
Mean    KLD:   0.004076 ±   0.000146
Maximum KLD:   0.047878
99.9%   KLD:   0.041558
Median  KLD:   0.003009
Minimum KLD:  -0.000005

====== Token probability statistics ======
Mean    Δp: -0.082 ± 0.054 %
Maximum Δp:  9.665%
Median  Δp: -0.001%
Minimum Δp: -9.625%
RMS Δp    :  1.741 ± 0.079 %
Same top p: 96.961 ± 0.538 %
"""  # noqa: E501


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("quality") / "tiny", _SHAPE)


def _texts(number: int) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(0, 640, WINDOW_TOKENS).tolist() for _ in range(number)]


def test_the_printed_statistics_are_read() -> None:
    score = parsed(_PRINTED, 2.388)
    assert score.nll == pytest.approx(math.log(10.907275))
    assert score.nll_change == pytest.approx(math.log(10.907275) - 2.388)
    assert (score.kl_divergence, score.same_top) == pytest.approx((0.004076, 0.96961))
    assert score.distance is None


def test_an_output_without_statistics_is_shown() -> None:
    with pytest.raises(ValueError, match="no perplexity: error: out of memory"):
        parsed("error: out of memory", 2.0)


def test_windows_are_whole_and_in_turns_of_prose_and_code() -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    found = windows(tokenizer, 4)
    assert [len(window) for window in found] == [WINDOW_TOKENS] * 4
    assert len({tuple(window) for window in found}) == 4
    texts = [tokenizer.decode(window) for window in found]
    assert ["import" in text for text in texts] == [False, True, False, True]


def test_the_reference_is_at_no_distance_from_itself(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(WINDOW_TOKENS - 1, 640, generator=generator) for _ in range(2)]
    texts = _texts(2)
    np.save(
        tmp_path / "exact.npy",
        torch.stack([rows[-NUM_COUNTED:].log_softmax(-1) for rows in logits]).numpy(),
    )
    reference = Reference(tmp_path / "exact.npy")
    score = reference.score(logits, texts)
    assert score.nll == pytest.approx(reference.nll(texts))
    assert (score.nll_change, score.kl_divergence, score.distance) == pytest.approx((0, 0, 0))
    assert score.same_top == 1.0
    louder = reference.score([2 * rows for rows in logits], texts)
    assert louder.kl_divergence > 0.1
    assert louder.distance is not None
    assert louder.distance > 0.1
    assert louder.same_top == 1.0


def test_the_base_file_holds_the_windows_and_their_logprobs(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).normal(size=(1, NUM_COUNTED, 7)).astype(np.float32)
    logprobs = torch.from_numpy(rows).log_softmax(-1).numpy()
    np.save(tmp_path / "exact.npy", logprobs)
    texts = _texts(1)
    data = write_base(tmp_path / "base", Reference(tmp_path / "exact.npy"), texts).read_bytes()
    assert data[:8] == b"_logits_"
    assert struct.unpack("<Iii", data[8:20]) == (WINDOW_TOKENS, 7, 1)
    token_bytes = 4 * WINDOW_TOKENS
    assert np.frombuffer(data[20 : 20 + token_bytes], np.int32).tolist() == texts[0]
    # A row has the scale and the lowest value as float32, its codes, and one more if they are odd.
    lines = np.frombuffer(data[20 + token_bytes :], np.uint16).reshape(NUM_COUNTED, 4 + 8)
    scale, low = np.ascontiguousarray(lines[:, :4]).view(np.float32).T
    values = scale[:, None] * lines[:, 4:-1] + low[:, None]
    np.testing.assert_allclose(values, logprobs[0], atol=1e-3)


@pytest.mark.parametrize("write", [write_permuted, write_widened])
def test_a_reshaped_checkpoint_computes_the_same(
    write: object, checkpoint: Path, tmp_path: Path
) -> None:
    assert callable(write)
    made = write(tmp_path / "made", checkpoint)
    tokens = torch.tensor(_texts(1))[:, :40]
    logits = []
    for folder in (checkpoint, made):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(model(tokens).logits)
    # Norm weights of a widened checkpoint are rounded to bfloat16 once more.
    torch.testing.assert_close(*logits, rtol=0, atol=0.01 * float(logits[0].abs().max()))
    config = read_model_config(made)
    if write is write_widened:
        widths = (config.hidden_size, config.num_attention_heads * config.head_dim)
        assert (*widths, config.intermediate_size) == (768, 768, 256)
    else:
        assert config == read_model_config(checkpoint)


def test_the_engine_is_near_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    texts = _texts(2)
    exact = tmp_path / "exact.npy"
    Reference.compute(exact, checkpoint, texts)
    score = in_new_process(measure_own, checkpoint, {"kv_cache_bytes": 1 << 24}, texts, exact)
    assert score.nll == pytest.approx(Reference(exact).nll(texts), abs=0.01)
    assert 0 < score.kl_divergence < 0.001
    assert score.distance is not None
    assert 0 < score.distance < 0.02


def test_the_table_names_each_way() -> None:
    score = Score(nll=2.4, nll_change=0.0123, kl_divergence=0.05, same_top=0.93, distance=None)
    row = Row(way="Q4_1", program="llama.cpp", score=score, file_bytes=91_700_000)
    result = Result(
        model="m", permuted=False, widened=False, cpu="c", num_tokens=255, nll=2.4, rows=[row]
    )
    assert table(result).splitlines()[-1] == (
        "| Q4_1 | llama.cpp | +0.0123 | 0.0500 | 93.0% |  | 91.7 |"
    )
