"""Quality of a real model in each way to run it, beside the same weights in float32.

    python -m benchmarks.quality MODEL [--permuted] [--widened] [--ways WAY ...] [--save]

MODEL is a catalogue's name such as smollm2, a checkpoint's folder, or a GGUF file. Its weights are
rounded to bfloat16 once, and all ways start from them:

  bf16, int8, int4, kv-int8   Millrace's own engine, weights or keys and values rounded at load
  Q8_0, Q4_K_M, ...           files that llama-quantize makes of them (`make engines`), by the
                              same engine and by llama-perplexity

The reference is transformers in float32. Texts are prose of docs/ and code of engine/, in windows
of 512 tokens whose second half counts, as in llama-perplexity.

  --permuted   hidden and intermediate channels in a random order: the same function, but a model
               that was published in blocks of 4 bits is as hard to round as any other
  --widened    widths rounded up to multiples of 256 with zeros, which K-types need
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from benchmarks.quality.llamacpp import GGUF_TYPES, measure_llamacpp, quantize, write_base
from benchmarks.quality.own import measure_own
from benchmarks.quality.reshaping import write_permuted, write_widened
from benchmarks.quality.scores import Reference, Score
from benchmarks.quality.texts import NUM_COUNTED, Window, windows
from benchmarks.support.command import PartResult, run_command
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.processes import in_new_process
from millrace.registry.catalogue import ModelEntry, load_catalogue
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.gguf_files import write_gguf
from tests.support.real_models import write_wide

Way = Literal["bf16", "int8", "int4", "kv-int8", "Q8_0", "Q6_K", "Q4_K_M", "Q4_1", "Q4_0"]
_OWN: Final[dict[str, dict[str, Any]]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}
# llama.cpp's name of how the tokenizer of SmolLM2 splits texts. Only ids reach llama.cpp here.
_PRE_TOKENIZER = "smollm"
_MILLRACE, _LLAMACPP = "millrace", "llama.cpp"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Score of one way in one program; ``file_bytes`` is the size of its GGUF file."""

    way: str
    program: str
    score: Score
    file_bytes: int | None = None


class Result(msgspec.Struct, kw_only=True):
    """Scores of a run; ``nll`` is float32's, in nats a token, over ``num_tokens`` tokens."""

    model: str
    permuted: bool
    widened: bool
    cpu: str
    num_tokens: int
    nll: float
    rows: list[Row]


def table(result: Result) -> str:
    """Format the scores as a Markdown table."""
    names = ("way", "program", "NLL", "KL divergence", "same top", "mean \\|Δlogprob\\|", "MB")
    lines = [" | ".join(names), " | ".join(["---", "---", *["---:"] * 5])]
    for row in result.rows:
        score = row.score
        cells = (
            row.way,
            row.program,
            f"{score.nll_change:+.4f}",
            f"{score.kl_divergence:.4f}",
            f"{score.same_top:.1%}",
            "" if score.distance is None else f"{score.distance:.4f}",
            "" if row.file_bytes is None else f"{row.file_bytes / 1e6:.1f}",
        )
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _measure(
    entry: ModelEntry,
    reshape: Sequence[Callable[[Path, Path], Path]],
    ways: Sequence[str],
    num_windows: int,
    folder: Path,
) -> tuple[float, list[Row]]:
    checkpoint = folder / "bf16"
    in_new_process(write_wide, entry, checkpoint, "bfloat16")
    for index, write in enumerate(reshape):
        checkpoint = in_new_process(write, folder / f"reshaped-{index}", checkpoint)
    texts = windows(Tokenizer.load(checkpoint), num_windows)
    exact = folder / "reference.npy"
    _say("float32")
    in_new_process(Reference.compute, exact, checkpoint, texts)
    rows = []
    for way in ways:
        if way in _OWN:
            _say(f"{way} in {_MILLRACE}")
            score = in_new_process(measure_own, checkpoint, _OWN[way], texts, exact)
            rows.append(Row(way=way, program=_MILLRACE, score=score))
    types = [kind for kind in GGUF_TYPES if kind in ways]
    if types:
        rows += _measure_files(checkpoint, types, texts, exact, folder)
    return Reference(exact).nll(texts), rows


def _measure_files(
    checkpoint: Path, types: Sequence[str], texts: Sequence[Window], exact: Path, folder: Path
) -> list[Row]:
    wide = write_gguf(folder / "bf16.gguf", checkpoint, pre_tokenizer=_PRE_TOKENIZER)
    reference = Reference(exact)
    base, exact_nll = write_base(folder / "base", reference, texts), reference.nll(texts)
    rows = []
    for kind in types:
        file = quantize(folder / f"{kind}.gguf", wide, kind)
        size = file.stat().st_size
        _say(f"{kind} in {_MILLRACE}")
        score = in_new_process(measure_own, file, {}, texts, exact)
        rows.append(Row(way=kind, program=_MILLRACE, score=score, file_bytes=size))
        _say(f"{kind} in {_LLAMACPP}")
        score = measure_llamacpp(file, base, exact_nll)
        rows.append(Row(way=kind, program=_LLAMACPP, score=score, file_bytes=size))
        file.unlink()
    return rows


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def run(
    model: str,
    /,
    *,
    permuted: bool = False,
    widened: bool = False,
    ways: Sequence[Way] = get_args(Way),
    num_windows: int = 10,
) -> PartResult:
    """Report the scores over ``num_windows`` windows; the default has 5,120 tokens."""
    # The processes of the measurement inherit it. Spinning threads are slow beside other processes,
    # and speed is not measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    entry = load_catalogue("").entry_for(model)
    reshape = [write_permuted] * permuted + [write_widened] * widened
    with tempfile.TemporaryDirectory() as folder:
        nll, rows = _measure(entry, reshape, ways, num_windows, Path(folder))
    result = Result(
        model=entry.name,
        permuted=permuted,
        widened=widened,
        cpu=cpu_name(),
        num_tokens=num_windows * NUM_COUNTED,
        nll=nll,
        rows=rows,
    )
    variants = [name for name, chosen in (("permuted", permuted), ("widened", widened)) if chosen]
    print(f"{entry.name}, {' '.join(variants) or 'as it is'}: {result.num_tokens} tokens, ", end="")
    print(f"NLL {nll:.4f} in float32; {result.cpu}\n\n{table(result)}")
    return PartResult(
        result, file="/".join(("quality", "_".join([entry.name, *variants]) + ".json"))
    )


if __name__ == "__main__":
    sys.exit(run_command("quality", run, __doc__))
