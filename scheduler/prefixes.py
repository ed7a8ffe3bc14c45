"""What of a job's prompt is in which worker's cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.prefix_index import PrefixIndex
from scheduler.worker_view import WorkerView
from schemas.control import PrefixReport
from schemas.jobs import Job
from schemas.prefix import REPORTED_BYTES, extend_keys, root_key


class Prefixes:
    """The index of reported prefixes, and the keys to look jobs up by."""

    def __init__(self, max_keys: int) -> None:
        self._index = PrefixIndex(max_keys)

    def observe(self, report: PrefixReport) -> None:
        self._index.apply(report)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._index.drop(worker_id)

    def keys_of(self, job: Job, workers: Iterable[WorkerView]) -> tuple[bytes, ...]:
        """The keys of a prompt's full blocks, as the workers of its model make them; none without
        workers. The last token is always computed, so it is in no block that is looked for."""
        worker = next(iter(workers), None)
        token_ids = job.prompt_token_ids or ()
        if worker is None:
            return ()
        size = worker.status.block_size_tokens
        keys: list[bytes] = []
        salt = job.tenant if worker.status.prefix_salted else ""
        num_blocks = max(0, len(token_ids) - 1) // size
        extend_keys(
            keys, root_key(salt), token_ids, num_blocks=num_blocks, block_size_tokens=size
        )
        return tuple(key[:REPORTED_BYTES] for key in keys)

    def cached_tokens(
        self, workers: Sequence[WorkerView], keys: Sequence[bytes]
    ) -> dict[str, int]:
        """How many leading tokens each worker has; those that have none are left out."""
        if not keys:
            return {}
        found = self._index.match([worker.worker_id for worker in workers], keys)
        sizes = {worker.worker_id: worker.status.block_size_tokens for worker in workers}
        return {worker_id: num * sizes[worker_id] for worker_id, num in found.items()}
