"""Run of one batch, from its file to its answers, by the gateway that owns it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from msgspec.structs import replace

from millrace.bus.store.objects import JournalConflictError, ObjectLostError
from millrace.gateway.batches.files import Files
from millrace.gateway.batches.input import (
    InputLine,
    LineTooLongError,
    check_input,
    lines_of,
    read_line,
)
from millrace.gateway.batches.line_run import LineRunner, ResultWaiter
from millrace.gateway.batches.lines import BatchEndpoint, LineAttempt
from millrace.gateway.batches.log import BatchLog
from millrace.gateway.batches.store import BatchRecord, BatchStore
from millrace.gateway.core import Gateway
from millrace.gateway.errors import NotFoundError
from millrace.gateway.request.job_maker import job_id
from millrace.runtime.tasks import first_error
from millrace.schemas.batches.batches import (
    Batch,
    BatchError,
    BatchErrors,
    BatchStatus,
    FilePurpose,
    LineError,
    RequestCounts,
)
from millrace.schemas.control import Cancel, CancelReason
from millrace.schemas.errors import MillraceError

_log = logging.getLogger(__name__)

_FLUSH_S = 0.25
_WATCH_S = 1.0
_RETRY_S = 1.0
_STOP_GRACE_S = 30.0
_NS_PER_S = 1_000_000_000
_CANCELLED = LineError(
    code="batch_cancelled", message="The batch was cancelled before this request was run."
)
_EXPIRED = LineError(
    code="batch_expired", message="This request was not run within the batch's completion window."
)
_ENDED_AT = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.CANCELLED: "cancelled_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.FAILED: "failed_at",
}
_FILE_GONE = (NotFoundError, ObjectLostError, LineTooLongError)


class BatchRun:
    """Run of a batch, continued from its log to the end.

    Every line is answered once: the queue takes each of its job ids once, and published and
    answered lines are in the log, to which only one owner can write. A superseded owner gets
    JournalConflictError from ``run``.
    """

    def __init__(
        self,
        gateway: Gateway,
        store: BatchStore,
        kinds: Mapping[str, BatchEndpoint],
        tenant: str,
        batch_id: str,
    ) -> None:
        self._gateway = gateway
        self._store = store
        self._kinds = kinds
        self._tenant = tenant
        self._batch_id = batch_id
        self._files = Files(gateway.bus.objects)
        self._log = BatchLog(store, gateway.bus.objects, batch_id)
        self._stopping = asyncio.Event()
        self._grace: asyncio.Timeout | None = None
        self._record: BatchRecord

    async def run(self) -> None:
        """Run until the batch has ended."""
        self._record = await self._store.get(self._tenant, self._batch_id)
        # A validated file has at least one request.
        is_taken_over = self._batch.request_counts.total > 0
        await self._log.load()
        if not is_taken_over and not self._batch.status.is_final:
            await self._validate()
        if not self._batch.status.is_final:
            if self._record.outcome is None:
                await self._work(is_taken_over=is_taken_over)
                await self._decide()
            await self._finalize()
        await self._log.forget()
        await self._store.close(self._tenant, self._batch_id)

    async def flush(self) -> None:
        """Write the log. Raises as the journal does."""
        await self._log.flush()

    @property
    def _batch(self) -> Batch:
        return self._record.batch

    # --- validating ---

    async def _validate(self) -> None:
        try:
            async with aclosing(self._input()) as lines:
                check = await check_input(lines, self._batch.endpoint)
            errors, num_lines = check.errors, check.num_lines
        except _FILE_GONE as error:
            errors, num_lines = (BatchError(code=error.code, message=error.message),), 0

        def begin(batch: Batch) -> Batch:
            if errors:
                return replace(
                    batch,
                    status=BatchStatus.FAILED,
                    failed_at=self._now_s(),
                    errors=BatchErrors(data=errors),
                )
            batch = replace(batch, request_counts=RequestCounts(total=num_lines))
            if batch.status is BatchStatus.VALIDATING:
                batch = replace(batch, status=BatchStatus.IN_PROGRESS, in_progress_at=self._now_s())
            return batch

        await self._change(begin)

    def _input(self) -> AsyncGenerator[InputLine]:
        """Return the lines of the input file. Raises one of ``_FILE_GONE`` if it is missing."""

        async def chunks() -> AsyncGenerator[bytes]:
            _, stored = await self._files.get(self._tenant, self._batch.input_file_id)
            async for chunk in self._files.read(stored):
                yield chunk

        return lines_of(chunks(), self._gateway.config.max_body_bytes)

    # --- working ---

    async def _work(self, *, is_taken_over: bool) -> None:
        """Run every unanswered line, until all are answered or the batch is stopped."""
        results = ResultWaiter(self._gateway.bus, self._tenant, self._gateway.clock)
        await results.start()
        runner = LineRunner(
            self._gateway,
            self._record,
            self._kinds[self._batch.endpoint],
            self._log,
            results,
            self._stopping,
            is_taken_over=is_taken_over,
        )
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._flush_forever()),
                    group.create_task(self._watch_forever()),
                ]
                await self._run_lines(runner)
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            # JournalConflictError takes precedence.
            raise first_error(group.subgroup(JournalConflictError) or group) from group
        finally:
            await results.close()
        if self._stopping.is_set():
            await self._answer_the_rest()
        while not await self._try_flush():
            await self._gateway.clock.sleep(_RETRY_S)

    async def _run_lines(self, runner: LineRunner) -> None:
        """Run the lines. After a stop, running lines have a grace period to end."""
        slots = asyncio.Semaphore(self._gateway.config.batch_lines_at_once)

        async def run(line: InputLine) -> None:
            try:
                await runner.run(line)
            finally:
                slots.release()

        try:
            async with asyncio.timeout(None) as self._grace, asyncio.TaskGroup() as group:
                await self._stop_if_due()
                async for line in self._lines():
                    await slots.acquire()
                    # Lines already in the queue will have results.
                    if self._stopping.is_set() and line.number not in self._log.in_queue:
                        slots.release()
                    else:
                        group.create_task(run(line))
        except TimeoutError:
            _log.info("lines of a stopped batch did not end", extra={"batch_id": self._batch_id})
        finally:
            self._grace = None

    async def _lines(self) -> AsyncGenerator[InputLine]:
        """Yield the unanswered lines. If the file disappears, the batch fails at its end and keeps
        its answers.
        """
        try:
            async with aclosing(self._input()) as lines:
                async for line in lines:
                    if line.number not in self._log.finished:
                        yield line
        except _FILE_GONE as error:
            lost = BatchErrors(data=(BatchError(code=error.code, message=error.message),))
            await self._change(lambda batch: replace(batch, errors=lost))

    # --- beside the lines ---

    async def _flush_forever(self) -> None:
        while True:
            await self._gateway.clock.sleep(_FLUSH_S)
            await self._try_flush()

    async def _try_flush(self) -> bool:
        """Write the log; return False if it must be retried."""
        try:
            await self._log.flush()
        except JournalConflictError:
            raise
        except MillraceError as error:
            if not error.retryable:
                raise
            return False
        return True

    async def _watch_forever(self) -> None:
        """Watch for a cancel and the end of the window, and publish the batch's progress."""
        while True:
            await self._gateway.clock.sleep(_WATCH_S)
            try:
                await self._change(self._with_counts)
                await self._stop_if_due()
            except MillraceError as error:
                if not error.retryable:
                    raise
                _log.debug("a batch's state was not written", extra={"cause": error.message})

    async def _stop_if_due(self) -> None:
        if self._stopping.is_set():
            return
        is_over = self._now_s() >= self._batch.expires_at
        if not is_over and self._batch.status is not BatchStatus.CANCELLING:
            return
        self._stopping.set()
        assert self._grace is not None
        self._grace.reschedule(asyncio.get_running_loop().time() + _STOP_GRACE_S)
        reason = CancelReason.DEADLINE if is_over else CancelReason.CLIENT
        for published in list(self._log.in_queue.values()):
            base = LineAttempt(self._batch_id, published.line, published.attempt).job_id
            for choice in range(len(published.sequences)):
                cancel = Cancel(request_id=job_id(base, choice, 0), reason=reason)
                await self._gateway.bus.control.cancel(cancel)

    def _with_counts(self, batch: Batch) -> Batch:
        counts = RequestCounts(
            total=batch.request_counts.total,
            completed=self._log.num_completed,
            failed=self._log.num_failed,
        )
        return replace(batch, request_counts=counts)

    # --- ending ---

    async def _answer_the_rest(self) -> None:
        """Answer each line that was not run with the reason."""
        why = _CANCELLED if self._batch.cancelling_at is not None else _EXPIRED
        async for line in self._lines():
            self._log.note_answer(line, read_line(line), why, ok=False)

    async def _decide(self) -> None:
        """Decide the final status of the batch, once and for all."""

        def decide(record: BatchRecord) -> BatchRecord:
            batch = self._with_counts(record.batch)
            if batch.cancelling_at is not None:
                return replace(record, batch=batch, outcome=BatchStatus.CANCELLED)
            if self._stopping.is_set():
                outcome = BatchStatus.EXPIRED
            elif batch.errors is not None:
                outcome = BatchStatus.FAILED
            else:
                outcome = BatchStatus.COMPLETED
            batch = replace(batch, status=BatchStatus.FINALIZING, finalizing_at=self._now_s())
            return replace(record, batch=batch, outcome=outcome)

        self._record = await self._store.change(self._tenant, self._batch_id, decide)

    async def _finalize(self) -> None:
        """Create the output files, each once across all owners, and publish the final status."""
        outcome = self._record.outcome
        assert outcome is not None
        output_id = await self._make_file("output", self._log.num_completed, ok=True)
        error_id = await self._make_file("error", self._log.num_failed, ok=False)
        await self._change(
            lambda batch: replace(
                self._with_counts(batch),
                status=outcome,
                output_file_id=output_id,
                error_file_id=error_id,
                **{_ENDED_AT[outcome]: self._now_s()},
            )
        )

    async def _make_file(self, kind: str, num_lines: int, *, ok: bool) -> str | None:
        """Create a file with these answers and return its id; None if there are none."""
        if not num_lines:
            return None
        file_id = f"file-{self._batch_id.removeprefix('batch_')}-{kind}"
        filename = f"{self._batch_id}_{kind}.jsonl"
        answers = self._log.answers(ok=ok)
        purpose = FilePurpose.BATCH_OUTPUT
        await self._files.put(self._tenant, file_id, answers, filename, purpose)
        return file_id

    async def _change(self, change: Callable[[Batch], Batch]) -> None:
        def changed(record: BatchRecord) -> BatchRecord:
            if record.batch.status.is_final:
                return record
            return replace(record, batch=change(record.batch))

        self._record = await self._store.change(self._tenant, self._batch_id, changed)

    def _now_s(self) -> int:
        return self._gateway.clock.now_ns() // _NS_PER_S
