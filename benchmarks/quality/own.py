"""Measurement of a model in Millrace's own engine. Each function needs a new process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.quality.scores import Reference, Score
from benchmarks.quality.texts import WINDOW_TOKENS, Window

if TYPE_CHECKING:
    import torch


def measure_own(
    model: Path, settings: dict[str, Any], texts: Sequence[Window], reference: Path
) -> Score:
    """Score the engine's log-probabilities of the windows, as ``prompt_logprobs`` computes them.

    ``model`` is a folder or a GGUF file, and ``settings`` are those of ``worker.engine``.
    """
    from millrace.engine.llm import LLM
    from millrace.schemas.sampling import SamplingParams

    one_token = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    rows: list[torch.Tensor] = []
    with LLM(model, device="cpu", prefix_cache=False, **settings) as llm:
        import torch

        _note_logits(rows.append)
        logits = []
        for window in texts:
            llm.generate([window], one_token)
            logits.append(torch.cat(rows))
            rows.clear()
            assert len(logits[-1]) == WINDOW_TOKENS - 1
    return Reference(reference).score(logits, texts)


def _note_logits(note: Callable[[torch.Tensor], object]) -> None:
    """Let the engine pass all logits of scored prompt tokens to ``note``, in the prompt's order.

    ``prompt_logprobs`` reports the likeliest tokens only, and a divergence needs all of them.
    """
    from millrace.engine.devices.cpu import runner
    from millrace.engine.sampling.prompt_logprobs import score_rows

    def noting(ranges: Any, hidden: Any, logits_of: Callable[[Any], torch.Tensor]) -> Any:
        def noted(rows: Any) -> torch.Tensor:
            logits = logits_of(rows)
            note(logits.clone())
            return logits

        return score_rows(ranges, hidden, noted)

    vars(runner)["score_rows"] = noting
