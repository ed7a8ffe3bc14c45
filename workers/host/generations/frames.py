"""Frames of a generation: its start, its tokens, its end."""

from __future__ import annotations

from itertools import accumulate

import msgspec

from millrace.schemas.frames import (
    Cancelled,
    Delta,
    Done,
    Embedding,
    Expired,
    Failed,
    Frame,
    PromptLogprobs,
    Started,
    TerminalFrame,
    TokenLogprob,
)
from millrace.schemas.records import Status
from millrace.workers.host.generations.generation import Generation

MAX_PROMPT_LOGPROBS_PER_FRAME = 512
MAX_TOKENS_PER_DELTA = 1024


def started_frame(generation: Generation, worker_id: str) -> Started:
    return Started(
        epoch=generation.epoch,
        worker_id=worker_id,
        num_prompt_tokens=len(generation.prompt_token_ids),
        num_cached_tokens=generation.accounting.num_cached_tokens,
    )


def token_frames(generation: Generation, from_index: int) -> list[Frame]:
    """Return the tokens from ``from_index`` on, in frames of bounded size."""
    num_tokens = generation.num_certain_tokens
    return [
        _delta(generation, start, min(start + MAX_TOKENS_PER_DELTA, num_tokens))
        for start in range(from_index, num_tokens, MAX_TOKENS_PER_DELTA)
    ]


def pre_token_frames(generation: Generation) -> list[Frame]:
    """Return the computed frames that come before the tokens, or instead of them."""
    epoch, output = generation.epoch, generation.output
    frames: list[Frame] = [*_prompt_logprob_frames(epoch, output.prompt_logprobs)]
    if output.beams is not None:
        frames += output.beams.frames(epoch)
    if output.embedding:
        frames.append(Embedding(epoch=epoch, values=output.embedding))
    return frames


def pop_unflushed(generation: Generation) -> list[Frame]:
    """Return the frames that the listeners have not got yet, and mark them as sent."""
    delivery = generation.delivery
    frames = token_frames(generation, delivery.num_flushed)
    delivery.num_flushed = max(delivery.num_flushed, generation.num_certain_tokens)
    if delivery.pre_token_flushed:
        return frames
    pre_token = pre_token_frames(generation)
    delivery.pre_token_flushed = bool(pre_token or frames)
    return pre_token + frames


def closing_frames(generation: Generation) -> list[Frame]:
    """Return the usage frame, if there is usage, and the terminal frame."""
    usage = generation.usage()
    told = [] if usage is None else [msgspec.structs.replace(usage, epoch=generation.epoch)]
    return [*told, _terminal_frame(generation)]


def _delta(generation: Generation, start: int, end: int) -> Delta:
    output = generation.output
    skip = output.num_resumed
    logprobs = output.logprobs and output.logprobs[max(0, start - skip) : max(0, end - skip)]
    if output.answer is not None:
        told = output.answer.delta_fields(start, end)
    else:
        pieces = output.pieces[start:end]
        ends = tuple(accumulate(map(len, pieces))) if len(pieces) > 1 else ()
        told = {"text": "".join(pieces), "text_ends": ends}
    return Delta(
        epoch=generation.epoch,
        index=start,
        token_ids=tuple(output.token_ids[start:end]),
        logprobs=tuple(logprobs),
        **told,
    )


def _terminal_frame(generation: Generation) -> TerminalFrame:
    outcome, output, epoch = generation.outcome, generation.output, generation.epoch
    assert outcome is not None
    num_tokens = len(output.token_ids)
    match outcome.status:
        case Status.CANCELLED:
            return Cancelled(epoch=epoch, num_tokens=num_tokens, reason=outcome.cancel_reason)
        case Status.EXPIRED:
            return Expired(epoch=epoch, num_tokens=num_tokens)
        case Status.FAILED:
            return Failed(epoch=epoch, code=outcome.error_code, message=outcome.error_message)
    assert generation.finish_reason is not None
    return Done(
        epoch=epoch,
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
        num_tokens=num_tokens,
        num_prompt_logprobs=len(output.prompt_logprobs),
        embedding_bytes=len(output.embedding),
        beams=() if output.beams is None else output.beams.ends,
        notices=generation.notices,
    )


def _prompt_logprob_frames(
    epoch: int, logprobs: tuple[TokenLogprob | None, ...]
) -> list[PromptLogprobs]:
    """Return one entry for each token of the prompt, in frames of bounded size."""
    size = MAX_PROMPT_LOGPROBS_PER_FRAME
    return [
        PromptLogprobs(epoch=epoch, index=start, logprobs=logprobs[start : start + size])
        for start in range(0, len(logprobs), size)
    ]
