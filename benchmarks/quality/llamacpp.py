"""Measurement of GGUF files by llama.cpp's own tools (``make engines``)."""

from __future__ import annotations

import math
import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.quality.scores import Reference, Score
from benchmarks.quality.texts import WINDOW_TOKENS, Window
from millrace.workers.servers.server_process import find_program

# GGUF types that ``llama-quantize`` makes, from fine to coarse.
GGUF_TYPES = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_1", "Q4_0")
_PACKAGE = "llama.cpp (make engines)"
_FIGURES = {
    "perplexity": re.compile(r"^Mean PPL\(Q\) +: +([\d.]+)", re.MULTILINE),
    "kl_divergence": re.compile(r"^Mean +KLD: +(-?[\d.]+)", re.MULTILINE),
    "same_top": re.compile(r"^Same top p: +([\d.]+)", re.MULTILINE),
}
# llama.cpp keeps log-probabilities of a reference as 16-bit steps over a range of at most e^16.
_MAX_RANGE = 16.0
_STEPS = 65535


def quantize(target: Path, source: Path, kind: str) -> Path:
    """Make a GGUF file of one of GGUF_TYPES from a wide one."""
    program = find_program("llama-quantize", "", _PACKAGE)
    _output([str(program), str(source), str(target), kind])
    return target


def write_base(path: Path, reference: Reference, texts: Sequence[Window]) -> Path:
    """Write the file with which ``llama-perplexity --kl-divergence`` compares.

    It holds the windows' token ids and the reference's log-probabilities, so that llama.cpp
    computes the same tokens and compares with the same float32.
    """
    vocab_size = reference.logprobs.shape[-1]
    odd = vocab_size % 2
    with path.open("wb") as file:
        file.write(b"_logits_")
        file.write(struct.pack("<Iii", WINDOW_TOKENS, vocab_size, len(texts)))
        file.write(np.array(texts, dtype=np.int32).tobytes())
        for rows in reference.logprobs:
            high = rows.max(-1, keepdims=True)
            low = np.maximum(rows.min(-1, keepdims=True), high - _MAX_RANGE)
            scale = ((high - low) / _STEPS).astype(np.float32)
            codes = np.rint((rows - low) / scale).clip(0, _STEPS).astype(np.uint16)
            header = np.concatenate([scale, low.astype(np.float32)], -1)
            padded = np.pad(codes, ((0, 0), (0, odd)))
            file.write(np.concatenate([header.view(np.uint16), padded], -1).tobytes())
    return path


def measure_llamacpp(model: Path, base: Path, exact_nll: float) -> Score:
    """Score a GGUF file by ``llama-perplexity`` beside the reference in ``base``.

    ``exact_nll`` is the reference's NLL. That of ``base`` is lower, since its log-probabilities are
    cut at e^-16 of the likeliest.
    """
    program = find_program("llama-perplexity", "", _PACKAGE)
    return parsed(
        _output(
            [
                *(str(program), "--model", str(model), "--kl-divergence"),
                *("--kl-divergence-base", str(base), "--ctx-size", str(WINDOW_TOKENS)),
            ]
        ),
        exact_nll,
    )


def parsed(output: str, exact_nll: float) -> Score:
    """Read the statistics that ``llama-perplexity --kl-divergence`` prints.

    Raises ValueError if the output lacks a figure.
    """
    figures = {}
    for name, pattern in _FIGURES.items():
        found = pattern.search(output)
        if found is None:
            raise ValueError(f"llama-perplexity printed no {name}: {output[-2000:]}")
        figures[name] = float(found[1])
    nll = math.log(figures["perplexity"])
    return Score(
        nll=nll,
        nll_change=nll - exact_nll,
        kl_divergence=figures["kl_divergence"],
        same_top=figures["same_top"] / 100,
        distance=None,
    )


def _output(command: Sequence[str]) -> str:
    """Run a program and return what it prints. Raises RuntimeError, with its last lines."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
