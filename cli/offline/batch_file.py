"""Lines of ``millrace generate``: requests in, answers out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from millrace.cli.adapter_options import Adapters, adapter_of
from millrace.cli.offline.chat_row import ChatRow
from millrace.cli.offline.engine_options import BadLine, BadLinesError, numbered_lines
from millrace.engine.offline.chat import tool_calls
from millrace.engine.offline.generated import (
    Generated,
    OfflineCompletion,
    OfflineRequest,
    generation_job,
)
from millrace.registry.served import ServedModel
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.sampling import SamplingOptions

_MAX_PRIORITY = 1_000


class _Row(ChatRow, frozen=True):
    """Fields of a line besides those of SamplingOptions."""

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    cancel_after_tokens: int | None = None


_ROW_FIELDS = frozenset(_Row.__struct_fields__)
_line_decoder = msgspec.json.Decoder(dict[str, Any])


def read_requests(
    file: Path, served: ServedModel, adapters: Adapters, *, keep_bad: bool = False
) -> list[OfflineRequest | BadLine]:
    """Read, check and tokenise every request of ``file``; blank lines are skipped.

    ``adapters`` are the adapters that a line may name. A request without an id gets its line
    number. With ``keep_bad``, the list contains a BadLine for each invalid line. Raises ConfigError
    if the file cannot be read, and without ``keep_bad`` BadLinesError with the number of each
    invalid line.
    """
    read: list[OfflineRequest | BadLine] = []
    seen: dict[str | int, int] = {}
    seed_source = random.Random()
    for number, line in numbered_lines(file):
        request = _read_line(number, line, served, adapters, seed_source)
        if isinstance(request, OfflineRequest):
            first = seen.setdefault(request.id, number)
            if first != number:
                why = f"id {request.id!r} is also that of line {first}"
                request = BadLine(id=number, number=number, code=BadLinesError.code, message=why)
        read.append(request)
    bad = [(line.number, line.message) for line in read if isinstance(line, BadLine)]
    if bad and not keep_bad:
        raise BadLinesError.of(file, bad)
    return read


def answer_line(generated: Generated) -> str:
    """Render an answer as one line of JSON: the completion, or ``choices`` if several were
    requested."""
    request, choices = generated.request, generated.choices
    assert request.job.prompt_token_ids is not None
    answer: dict[str, Any] = {"id": request.id}
    if len(choices) == 1:
        answer |= _completion(choices[0], generated)
    else:
        answer["completion_tokens"] = generated.num_tokens
        answer["choices"] = [
            {"index": index, **_completion(choice, generated)}
            for index, choice in enumerate(choices)
        ]
    answer["prompt_tokens"] = len(request.job.prompt_token_ids)
    if generated.prompt_logprobs:
        answer["prompt_logprobs"] = [
            None if entry is None else _logprob(entry) for entry in generated.prompt_logprobs
        ]
    if generated.num_cached_tokens:
        answer["cached_tokens"] = generated.num_cached_tokens
    return on_one_line(msgspec.json.encode(answer)).decode() + "\n"


def _completion(choice: OfflineCompletion, generated: Generated) -> dict[str, Any]:
    """Return a completion's fields. ``tool_calls``, ``cancelled``, ``logprobs``, ``error``, and
    ``cumulative_logprob`` of a beam search are present only if set."""
    text = "".join(choice.text)
    shown: dict[str, Any] = {
        "token_ids": choice.token_ids,
        "text": text,
        "finish_reason": choice.finish_reason,
        "completion_tokens": len(choice.token_ids),
    }
    request = generated.request
    if request.job.sampling.use_beam_search and choice.finish_reason is not None:
        shown["cumulative_logprob"] = choice.cumulative_logprob
    tool_format, tools = request.tool_format, request.tools
    calls = tool_calls(text, tool_format, tools, request.freeform) if tool_format else []
    if calls:
        shown["tool_calls"] = calls
    if generated.request.job.sampling.logprobs is not None:
        shown["logprobs"] = [_logprob(entry) for entry in choice.logprobs]
    if choice.error is not None:
        code, message = choice.error
        shown["error"] = {"code": code, "message": message}
    elif not choice.ended:
        shown["cancelled"] = True
    return shown


def _read_line(
    number: int,
    raw: bytes,
    served: ServedModel,
    adapters: Adapters,
    seed_source: random.Random,
) -> OfflineRequest | BadLine:
    own_id: str | int = number
    try:
        fields = _line_decoder.decode(raw)
        row = msgspec.convert({k: v for k, v in fields.items() if k in _ROW_FIELDS}, _Row)
        own_id = number if row.id is None else row.id
        adapter = adapter_of(row.adapter, adapters)
        request = _request(number, own_id, row, fields, served, seed_source)
    except (MillraceError, ValueError) as error:
        code = error.code if isinstance(error, MillraceError) else BadLinesError.code
        return BadLine(id=own_id, number=number, code=code, message=str(error))
    return msgspec.structs.replace(request, adapter=adapter)


def _request(
    number: int,
    own_id: str | int,
    row: _Row,
    fields: dict[str, Any],
    served: ServedModel,
    seed_source: random.Random,
) -> OfflineRequest:
    if abs(row.priority) > _MAX_PRIORITY:
        raise ParameterError("priority", f"priority must be within ±{_MAX_PRIORITY}")
    if row.cancel_after_tokens is not None and row.cancel_after_tokens < 0:
        raise ParameterError("cancel_after_tokens", "cancel_after_tokens must not be negative")
    if row.cancel_after_tokens and fields.get("use_beam_search"):
        raise ParameterError(
            "cancel_after_tokens",
            "cancel_after_tokens above 0 does not go with use_beam_search: all tokens come at once",
        )
    sampling = {name: value for name, value in fields.items() if name not in _ROW_FIELDS}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    options = msgspec.convert(sampling, SamplingOptions, str_keys=True)
    chat = row.read()
    job = generation_job(
        served,
        seed_source,
        request_id=str(number),
        sampling=options,
        chat=chat,
        prompt=row.prompt,
        prompt_token_ids=row.prompt_token_ids,
    )
    return OfflineRequest(
        id=own_id,
        job=job,
        priority=row.priority,
        cache_salt=row.cache_salt,
        cancel_after_tokens=row.cancel_after_tokens,
        tool_format=served.tool_format if chat.tools else None,
        tools=chat.tools,
        freeform=tuple(chat.freeform),
    )


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
    }
