"""Frames out of what a generation holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from millrace.schemas.frames import (
    Cancelled,
    Delta,
    Expired,
    Failed,
    PromptLogprobs,
    TerminalFrame,
    TokenLogprob,
)
from millrace.schemas.records import Status
from millrace.workers.host.generations.outcomes import GenerationOutcome

MAX_PROMPT_LOGPROBS_PER_FRAME = 512


def prompt_logprob_frames(
    epoch: int, logprobs: tuple[TokenLogprob | None, ...]
) -> list[PromptLogprobs]:
    """One entry for each token of the prompt, in frames of bounded size."""
    size = MAX_PROMPT_LOGPROBS_PER_FRAME
    return [
        PromptLogprobs(epoch=epoch, index=start, logprobs=logprobs[start : start + size])
        for start in range(0, len(logprobs), size)
    ]


def delta(
    epoch: int,
    index: int,
    token_ids: Sequence[int],
    pieces: Sequence[str],
    logprobs: Sequence[TokenLogprob],
) -> Delta:
    """Tokens from ``index`` on; ``pieces[i]`` is the text that ``token_ids[i]`` added."""
    return Delta(
        epoch=epoch,
        index=index,
        token_ids=tuple(token_ids),
        text="".join(pieces),
        text_ends=tuple(accumulate(map(len, pieces))) if len(pieces) > 1 else (),
        logprobs=tuple(logprobs),
    )


def unanswered(outcome: GenerationOutcome, epoch: int, num_tokens: int) -> TerminalFrame | None:
    """The terminal frame of a generation that did not end well; None if it did."""
    match outcome.status:
        case Status.CANCELLED:
            return Cancelled(epoch=epoch, num_tokens=num_tokens, reason=outcome.cancel_reason)
        case Status.EXPIRED:
            return Expired(epoch=epoch, num_tokens=num_tokens)
        case Status.FAILED:
            return Failed(epoch=epoch, code=outcome.error_code, message=outcome.error_message)
        case _:
            return None
