"""The lines of a batch's output and error files."""

from __future__ import annotations

import msgspec

from millrace.gateway.batches.input import InputLine
from millrace.gateway.errors import Refusal
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.batches.batches import BatchAnswer, BatchLine, LineError, LineResponse

_OK = 200
_encoder = msgspec.json.Encoder()


def answered(
    batch_id: str, line: InputLine, request: BatchLine, request_id: str, body: bytes
) -> bytes:
    """The line that says what the endpoint answers."""
    return _encode(batch_id, line, request, LineResponse(_OK, request_id, msgspec.Raw(body)), None)


def refused(
    batch_id: str, line: InputLine, request: BatchLine, request_id: str, refusal: Refusal
) -> bytes:
    """The line that says how the endpoint refuses."""
    response = LineResponse(refusal.status, request_id, msgspec.Raw(refusal.body))
    return _encode(batch_id, line, request, response, None)


def not_run(batch_id: str, line: InputLine, request: BatchLine, code: str, message: str) -> bytes:
    """The line of a request that was never run."""
    return _encode(batch_id, line, request, None, LineError(code=code, message=message))


def _encode(
    batch_id: str,
    line: InputLine,
    request: BatchLine,
    response: LineResponse | None,
    error: LineError | None,
) -> bytes:
    return on_one_line(
        _encoder.encode(
            BatchAnswer(
                id=f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}",
                custom_id=request.custom_id,
                response=response,
                error=error,
            )
        )
    )
