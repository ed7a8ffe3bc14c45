"""Endpoint ``/v1/batches``: many requests in one file, answered within a day by any gateway."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace.gateway.api.rest import RestApi, list_response, page_of
from millrace.gateway.batches.files import Files, new_ordered_id
from millrace.gateway.batches.store import BatchRecord, BatchStore
from millrace.gateway.core import Gateway
from millrace.gateway.errors import NotFoundError
from millrace.gateway.transport.http import json_response
from millrace.registry.requests.message_fields import check_metadata
from millrace.runtime.redis.link import reachable
from millrace.schemas.batches.batches import (
    Batch,
    BatchList,
    BatchRequest,
    BatchStatus,
    FilePurpose,
)
from millrace.schemas.errors import MillraceError, ParameterError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
WINDOW = "24h"

_ID_PREFIX = "batch_"
_WINDOW_S = 24 * 3600
_DEFAULT_PAGE = 20
_MAX_PAGE = 100
_NS_PER_S = 1_000_000_000
_STOPPABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class BatchOverError(MillraceError, code="batch_not_cancellable", http_status=409):
    """Cancel of a batch that has ended, or is about to."""


class BatchesApi(RestApi):
    """Batch endpoints; each tenant sees its own batches. ``BatchRunner`` runs them."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._store = BatchStore(gateway.bus.journal)
        self._files = Files(gateway.bus.objects)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Store a batch; a gateway begins to run it soon."""
        gateway = self._gateway
        caller = await gateway.identity.caller(request.scope)
        gateway.stores.check()
        asked = await self._read(request, BatchRequest)
        _check(asked)
        await self._check_input(caller.tenant, asked.input_file_id)
        reachable(gateway.redis)  # without Redis no gateway would run the batch
        now_ns = gateway.clock.now_ns()
        batch = Batch(
            id=new_ordered_id(_ID_PREFIX, now_ns),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            status=BatchStatus.VALIDATING,
            created_at=now_ns // _NS_PER_S,
            expires_at=now_ns // _NS_PER_S + _WINDOW_S,
            metadata=asked.metadata,
        )
        record = BatchRecord(batch=batch, caller=caller)
        await self._store.create(record, gateway.config.max_open_batches)
        gateway.has_new_batch.set()
        return json_response(batch)

    async def retrieve(self, request: Request) -> Response:
        caller = await self._caller(request)
        record = await self._store.get(caller.tenant, request.path_params["batch_id"])
        return json_response(record.batch)

    async def list(self, request: Request) -> Response:
        caller = await self._caller(request)
        ids = await self._store.ids(caller.tenant)
        page = page_of(request, ids, default=_DEFAULT_PAGE, most=_MAX_PAGE)
        entries = await self._store.batches(caller.tenant, page.ids)
        return list_response(BatchList, entries, page.has_more)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch's waiting and running requests; finished answers stay in the files.
        Repeated calls change nothing.
        """
        caller = await self._caller(request)
        batch_id = request.path_params["batch_id"]
        now_s = self._gateway.clock.now_ns() // _NS_PER_S

        def cancelling(record: BatchRecord) -> BatchRecord:
            batch = record.batch
            if batch.status not in _STOPPABLE:
                return record
            batch = replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now_s)
            return replace(record, batch=batch)

        record = await self._store.change(caller.tenant, batch_id, cancelling)
        if record.batch.cancelling_at is None:
            raise BatchOverError(
                f"The batch {batch_id} is {record.batch.status}; it cannot be cancelled any more."
            )
        return json_response(record.batch)

    async def _check_input(self, tenant: str, file_id: str) -> None:
        try:
            file, _ = await self._files.get(tenant, file_id)
        except NotFoundError as error:
            raise ParameterError("input_file_id", error.message) from error
        if file.purpose is not FilePurpose.BATCH:
            raise ParameterError(
                "input_file_id", f"The file {file_id} has the purpose {file.purpose}, not batch."
            )


def _check(asked: BatchRequest) -> None:
    if asked.endpoint not in ENDPOINTS:
        raise ParameterError("endpoint", f"endpoint must be one of {', '.join(ENDPOINTS)}.")
    if asked.completion_window != WINDOW:
        raise ParameterError("completion_window", f"completion_window must be {WINDOW}.")
    check_metadata(asked.metadata)
