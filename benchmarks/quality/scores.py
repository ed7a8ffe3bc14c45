"""Distance of a model's log-probabilities from those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.quality.texts import FIRST_COUNTED, NUM_COUNTED, Window

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of one way to run a model, over the counted tokens.

    - ``nll`` is the mean negative log-likelihood in nats, ``nll_change`` its change from float32.
    - ``kl_divergence`` is the mean divergence of the distributions from float32's, in nats.
    - ``same_top`` is the share of tokens at which the likeliest token is float32's.
    - ``distance`` is the mean |Δlogprob| of the text's tokens; None if it was not measured.
    """

    nll: float
    nll_change: float
    kl_divergence: float
    same_top: float
    distance: float | None


class Reference:
    """Log-probabilities in float32, in the file ``path``: [windows, NUM_COUNTED, vocab_size].

    ``path`` is a NumPy file, which several processes map.
    """

    def __init__(self, path: Path) -> None:
        self.logprobs: npt.NDArray[np.float32] = np.load(path, mmap_mode="r")

    @classmethod
    def compute(cls, path: Path, checkpoint: Path, texts: Sequence[Window]) -> None:
        """Compute the log-probabilities of a checkpoint by transformers, and write ``path``."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        shape = (len(texts), NUM_COUNTED, model.config.vocab_size)
        written = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        with torch.inference_mode():
            for index, window in enumerate(texts):
                logits = model(torch.tensor([window])).logits[0]
                written[index] = counted(logits[:-1]).log_softmax(-1).numpy()
        written.flush()

    def score(self, logits: Sequence[torch.Tensor], texts: Sequence[Window]) -> Score:
        """Compare logits [WINDOW_TOKENS - 1, vocab_size] of each window's second to last token."""
        import torch

        sums = {"nll": 0.0, "reference": 0.0, "kl": 0.0, "same": 0.0, "distance": 0.0}
        for index, (rows, window) in enumerate(zip(logits, texts, strict=True)):
            own = counted(rows).float().log_softmax(-1)
            exact = torch.from_numpy(np.array(self.logprobs[index]))
            targets = torch.tensor(window[FIRST_COUNTED:])[:, None]
            of_text, exact_of_text = own.gather(1, targets), exact.gather(1, targets)
            sums["nll"] -= float(of_text.double().sum())
            sums["reference"] -= float(exact_of_text.double().sum())
            sums["kl"] += float((exact.exp() * (exact - own)).double().sum())
            sums["same"] += float((own.argmax(-1) == exact.argmax(-1)).sum())
            sums["distance"] += float((of_text - exact_of_text).abs().double().sum())
        means = {name: value / (len(texts) * NUM_COUNTED) for name, value in sums.items()}
        return Score(
            nll=means["nll"],
            nll_change=means["nll"] - means["reference"],
            kl_divergence=means["kl"],
            same_top=means["same"],
            distance=means["distance"],
        )

    def nll(self, texts: Sequence[Window]) -> float:
        """Return the mean negative log-likelihood of the counted tokens, in nats."""
        found = [
            np.take_along_axis(rows, np.array(window[FIRST_COUNTED:])[:, None], 1).mean()
            for rows, window in zip(self.logprobs, texts, strict=True)
        ]
        return -float(np.mean(found))


def counted(logits: torch.Tensor) -> torch.Tensor:
    """Return the rows that predict counted tokens, of a window's rows without the last one."""
    return logits[FIRST_COUNTED - 1 :]
