"""The lines of ``millrace generate``: requests in, answers out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from cli.offline import Generated
from registry.served import ServedModel
from schemas.errors import ConfigError, MillraceError
from schemas.frames import FinishReason, TokenLogprob
from schemas.jobs import ChatMessage, Job
from schemas.sampling import SamplingParams

_MAX_SHOWN = 20


class BadLinesError(MillraceError):
    """Lines of the input cannot be run; the message names each by its number."""

    code = "invalid_input"
    http_status = 400


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


class Request(msgspec.Struct, frozen=True):
    """A prepared job, whose request id is its line number, and the id that the caller gave."""

    id: str | int
    job: Job


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str | int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    error: dict[str, str] | None = None


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


def read_requests(file: Path, served: ServedModel) -> list[Request]:
    """Every request of ``file``, checked and tokenised; blank lines are skipped.

    A request without an id gets its line number. Raises ConfigError if the file cannot be read,
    BadLinesError with the number of each line that is no request for this model.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    requests: list[Request] = []
    seen: dict[str | int, int] = {}
    bad: list[str] = []
    seed_source = random.Random()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _request(number, line, served, seed_source)
        except (MillraceError, ValueError) as error:
            bad.append(f"{file}, line {number}: {error}")
            continue
        if request.id in seen:
            first = seen[request.id]
            bad.append(f"{file}, line {number}: id {request.id!r} is also that of line {first}")
            continue
        seen[request.id] = number
        requests.append(request)
    if bad:
        more = [f"and {len(bad) - _MAX_SHOWN} more"] if len(bad) > _MAX_SHOWN else []
        raise BadLinesError("\n".join([*bad[:_MAX_SHOWN], *more]))
    return requests


def answer_line(request: Request, generated: Generated) -> str:
    """An answer as one line of JSON. ``logprobs`` and ``error`` are there if there are any."""
    assert request.job.prompt_token_ids is not None
    error = generated.error
    answer = _Answer(
        id=request.id,
        token_ids=generated.token_ids,
        text="".join(generated.text),
        finish_reason=generated.finish_reason,
        prompt_tokens=len(request.job.prompt_token_ids),
        completion_tokens=len(generated.token_ids),
        logprobs=None
        if request.job.sampling.logprobs is None
        else [_logprob(entry) for entry in generated.logprobs],
        error=None if error is None else {"code": error[0], "message": error[1]},
    )
    return _encoder.encode(answer).decode() + "\n"


def _request(number: int, raw: bytes, served: ServedModel, seed_source: random.Random) -> Request:
    line = _decoder.decode(raw)
    job = Job(
        request_id=str(number),
        model=served.entry.name,
        prompt=line.prompt,
        messages=line.messages,
        prompt_token_ids=line.prompt_token_ids,
        sampling=SamplingParams(
            max_tokens=line.max_tokens,
            temperature=line.temperature,
            top_p=line.top_p,
            top_k=line.top_k,
            min_p=line.min_p,
            seed=line.seed,
            stop=(line.stop,) if isinstance(line.stop, str) else line.stop,
            stop_token_ids=line.stop_token_ids,
            ignore_eos=line.ignore_eos,
            logprobs=line.logprobs,
        ),
    )
    return Request(number if line.id is None else line.id, served.prepare(job, seed_source))


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
    }
