"""OpenAI's batches: many requests in one file, answered within a day."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class FilePurpose(StrEnum):
    """Purpose of a file. Clients upload BATCH files; the gateway writes BATCH_OUTPUT files."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a file. Times are UTC epoch in seconds; the file is removed at ``expires_at``."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Page of files; ``after=last_id`` asks for the next page."""

    data: tuple[FileObject, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


MAX_LINES = 50_000


class BatchStatus(StrEnum):
    """Status of a batch: ``VALIDATING -> IN_PROGRESS -> FINALIZING -> COMPLETED``. CANCELLING
    precedes CANCELLED, EXPIRED is a batch that ran out of time, FAILED an invalid input file."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of the input file: one request. ``body`` is the body of its endpoint."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of an input file. ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[BatchError, ...]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of lines: in all, completed, and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """State of a batch. Times are UTC epoch in seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Page of batches, newest first; ``after=last_id`` asks for the next page."""

    data: tuple[Batch, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class LineResponse(msgspec.Struct, frozen=True):
    """Response of the endpoint to one line."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a line that was not run."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Line of the output file or of the error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None
