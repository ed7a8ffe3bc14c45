"""OpenAI's file objects."""

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
