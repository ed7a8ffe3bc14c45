"""OpenAI's batches: many requests in one file, answered within a day."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class FilePurpose(StrEnum):
    """What a file is for. Clients upload those of BATCH; BATCH_OUTPUT are made here."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file's entry. Times are UTC epoch in seconds; it is removed at ``expires_at``."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """One page; ``after=last_id`` asks for the next one."""

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
    """``VALIDATING -> IN_PROGRESS -> FINALIZING -> COMPLETED``; the others are CANCELLING before
    CANCELLED, EXPIRED for one that ran out of time, and FAILED for a file that is no batch."""

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
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of the input file; ``body`` is what its endpoint takes."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a file is no batch; ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[BatchError, ...]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines in all, answered well, and ended in an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands. Times are UTC epoch in seconds."""

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
    """One page, newest first; ``after=last_id`` asks for the next one."""

    data: tuple[Batch, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class LineResponse(msgspec.Struct, frozen=True):
    """What the endpoint would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line was not run."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output file, or of the error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None
