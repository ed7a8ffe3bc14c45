"""Endpoint ``/v1/files``: files that clients upload for batches, and output files of batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from millrace.gateway.api.rest import RestApi, list_response, page_of
from millrace.gateway.batches.files import Files, new_ordered_id
from millrace.gateway.batches.store import BatchStore
from millrace.gateway.core import Gateway
from millrace.gateway.transport.http import (
    BodyDeadline,
    ClientLeftError,
    content_length,
    json_response,
)
from millrace.schemas.batches.batches import FileDeleted, FileList, FileObject, FilePurpose
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import MillraceError, ParameterError, PayloadTooLargeError

_ID_PREFIX = "file-"
_READ_BYTES = 256 * 1024
_LINGER_S = 2.0
_FORM_BYTES = 64 * 1024  # overhead of a form around its file
_MAX_FILENAME_CHARACTERS = 256
_MAX_PAGE = 10_000
_NO_CHARSET = "The form is not in the charset that its content-type names; leave charset out."
_LIST_FIELDS = ("order", "purpose")


class FileInUseError(MillraceError, code="file_in_use", http_status=409):
    """Delete of a file that an unfinished batch reads."""


class StorageFullError(MillraceError, code="storage_limit_exceeded", http_status=413):
    """Upload beyond the tenant's limit of files or of their bytes."""


class FilesApi(RestApi):
    """File endpoints; each tenant sees its own files."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._files = Files(gateway.bus.objects)
        self._batches = BatchStore(gateway.bus.journal)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list, methods=["GET"]),
            Route("/v1/files/{file_id}", self.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Store a form with ``file`` and ``purpose``. The file is streamed, never in memory as a
        whole.
        """
        caller = await self._caller(request)
        self._gateway.stores.check()
        limit_bytes = self._gateway.config.max_file_bytes
        parser = await _parser(request, self._gateway.config)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise ParameterError("file", f"The form cannot be read: {error.message}") from error
        except UnicodeError as error:
            raise ParameterError("content-type", _NO_CHARSET) from error
        try:
            upload = _checked(dict(form.multi_items()))
            if (upload.size or 0) > limit_bytes:
                raise PayloadTooLargeError(upload.size or 0, limit_bytes)
            if not upload.size:
                raise ParameterError("file", "The file is empty.")
            await self._check_room(caller.tenant, upload.size)
            stored = await self._files.put(
                caller.tenant,
                new_ordered_id(_ID_PREFIX, self._gateway.clock.now_ns()),
                _chunks(upload),
                upload.filename or "",
                FilePurpose.BATCH,
            )
            await self._check_still_room(caller.tenant, stored)
        finally:
            await form.close()
        return json_response(stored)

    async def _check_still_room(self, tenant: str, stored: FileObject) -> None:
        """Check the limits again after the upload, since other uploads may have finished meanwhile;
        delete the file if it exceeds them.
        """
        try:
            await self._check_room(tenant, stored.bytes, besides=stored.id)
        except StorageFullError:
            await self._files.delete(tenant, stored.id)
            raise

    async def _check_room(self, tenant: str, size_bytes: int, besides: str = "") -> None:
        """Raise StorageFullError if a file of this size exceeds the tenant's limits."""
        config = self._gateway.config
        ids = [one for one in await self._files.ids(tenant) if one != besides]
        if len(ids) >= config.max_stored_files:
            raise StorageFullError(
                f"{len(ids)} files are kept, which is the limit. Delete some first."
            )
        stored_bytes = sum(file.bytes for file in await self._files.files(tenant, ids))
        limit_bytes = config.max_stored_file_bytes
        if stored_bytes + size_bytes > limit_bytes:
            raise StorageFullError(
                f"{stored_bytes} bytes of files are kept and {size_bytes} would be more than the "
                f"limit of {limit_bytes} bytes. Delete some first."
            )

    async def list(self, request: Request) -> Response:
        caller = await self._caller(request)
        purpose = request.query_params.get("purpose")
        ids = await self._files.ids(caller.tenant)
        if purpose is not None:
            of_purpose = await self._files.files(caller.tenant, ids)
            ids = [file.id for file in of_purpose if file.purpose.value == purpose]
        page = page_of(request, ids, default=_MAX_PAGE, most=_MAX_PAGE, more_fields=_LIST_FIELDS)
        entries = await self._files.files(caller.tenant, page.ids)
        return list_response(FileList, entries, page.has_more)

    async def retrieve(self, request: Request) -> Response:
        caller = await self._caller(request)
        file, _ = await self._files.get(caller.tenant, request.path_params["file_id"])
        return json_response(file)

    async def content(self, request: Request) -> Response:
        caller = await self._caller(request)
        file, stored = await self._files.get(caller.tenant, request.path_params["file_id"])
        return StreamingResponse(
            self._files.read(stored),
            headers={"content-length": str(file.bytes)},
            media_type="application/octet-stream",
        )

    async def delete(self, request: Request) -> Response:
        """Delete a file. Raises FileInUseError while a batch reads it."""
        caller = await self._caller(request)
        file_id = request.path_params["file_id"]
        batch_id = await self._batches.reader_of(caller.tenant, file_id)
        if batch_id is not None:
            raise FileInUseError(
                f"The batch {batch_id} reads this file. Cancel it, or wait for its end."
            )
        await self._files.delete(caller.tenant, file_id)
        return json_response(FileDeleted(id=file_id))


async def _parser(request: Request, config: GatewayConfig) -> MultiPartParser:
    """Return a parser of the form.

    Raises ParameterError for another kind of body, PayloadTooLargeError for a declared size over
    the limit.
    """
    limit_bytes = config.max_file_bytes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ParameterError(
            "content-type", "Send a form of the type multipart/form-data with file and purpose."
        )
    declared_bytes = content_length(request.scope)
    if declared_bytes is not None and declared_bytes > limit_bytes + _FORM_BYTES:
        await _let_finish(request)
        raise PayloadTooLargeError(declared_bytes, limit_bytes)
    return MultiPartParser(request.headers, _body(request, config), max_files=1, max_fields=8)


async def _body(request: Request, config: GatewayConfig) -> AsyncGenerator[bytes]:
    """Yield the chunks of the body as they arrive.

    Raises PayloadTooLargeError for a body over the limit, SlowRequestError for a stalled or slow
    body, and ClientLeftError.
    """
    limit_bytes = config.max_file_bytes
    num_bytes = 0
    now_s = asyncio.get_running_loop().time
    deadline = BodyDeadline(config, now_s())
    while True:
        try:
            async with asyncio.timeout_at(deadline.at_s(num_bytes, now_s())):
                event = await request.receive()
        except TimeoutError:
            raise deadline.error(num_bytes) from None
        if event["type"] == "http.disconnect":
            raise ClientLeftError
        chunk = event.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > limit_bytes + _FORM_BYTES:
            await _let_finish(request)
            raise PayloadTooLargeError(num_bytes, limit_bytes)
        yield chunk
        if not event.get("more_body", False):
            return


async def _let_finish(request: Request) -> None:
    """Discard the rest of the body for a moment: clients read an answer only after sending."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while (event := await request.receive())["type"] != "http.disconnect":
                if not event.get("more_body", False):
                    return
    except (TimeoutError, MillraceError):
        return


def _checked(fields: dict[str, UploadFile | str]) -> UploadFile:
    """Return the form's file. Raises ParameterError that names the invalid field."""
    for name in fields:
        if name not in ("file", "purpose"):
            raise ParameterError(name, f"{name:.100} is not a field of this request; leave it out.")
    upload, purpose = fields.get("file"), fields.get("purpose")
    if not isinstance(upload, UploadFile):
        raise ParameterError("file", "file is required, with a file name.")
    if len(upload.filename or "") > _MAX_FILENAME_CHARACTERS:
        raise ParameterError(
            "file", f"The file's name must have at most {_MAX_FILENAME_CHARACTERS} characters."
        )
    if any("\ud800" <= character <= "\udfff" for character in upload.filename or ""):
        # Some charsets can encode halves of characters, which cannot be decoded.
        raise ParameterError("content-type", _NO_CHARSET)
    if purpose is None:
        raise ParameterError("purpose", "purpose is required; it must be batch.")
    if purpose != FilePurpose.BATCH.value:
        raise ParameterError("purpose", f"purpose must be batch, got {purpose!r:.100}.")
    return upload


async def _chunks(upload: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await upload.read(_READ_BYTES):
        yield chunk
