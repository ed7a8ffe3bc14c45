"""Where a request's context can be pulled from instead of being computed again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from millrace.scheduler.fleet.worker_view import ASSUMED_PULL_GAIN, WorkerView
from millrace.schemas.transfer import KvSource

# What a pull costs beside its bytes: it is asked for, and the request waits for it.
PULL_OVERHEAD_S = 0.005


class Holder(NamedTuple):
    """A worker that has so many of a request's leading tokens."""

    worker: WorkerView
    num_tokens: int

    def as_source(self) -> KvSource | None:
        """As a worker is told of it; None: it serves nothing."""
        endpoint = self.worker.status.transfer
        if endpoint is None:
            return None
        return KvSource(
            worker_id=self.worker.worker_id, endpoint=endpoint, num_tokens=self.num_tokens
        )


class Pull(NamedTuple):
    """``num_tokens`` that a worker lacks are pulled from ``holder``, in ``seconds``."""

    holder: Holder
    num_tokens: int
    seconds: float


class KvHolders:
    """Of each kind of blocks the worker that has most of a request's leading tokens. Made once for
    each request that is placed: O(workers that have some of it)."""

    def __init__(self, workers: Iterable[WorkerView], cached: Mapping[str, int]) -> None:
        self._by_kind: dict[tuple[str, str], Holder] = {}
        if not cached:
            return
        for worker in workers:
            num_tokens = cached.get(worker.worker_id, 0)
            if num_tokens and worker.kv_kind is not None:
                known = self._by_kind.get(worker.kv_kind)
                if known is None or num_tokens > known.num_tokens:
                    self._by_kind[worker.kv_kind] = Holder(worker, num_tokens)

    def pull(
        self, worker: WorkerView, num_cached_tokens: int, prefill_token_s: float
    ) -> Pull | None:
        """What a worker would pull that has so many of the tokens itself, if that takes less time
        than to compute them, at ``prefill_token_s`` each; what is ahead of them there makes either
        wait."""
        if worker.kv_kind is None or not self._by_kind:
            return None
        holder = self._by_kind.get(worker.kv_kind)
        if holder is None or holder.worker is worker:
            return None
        num_tokens = holder.num_tokens - num_cached_tokens
        token_s = pull_token_s(worker, prefill_token_s)
        own_s = PULL_OVERHEAD_S + num_tokens * token_s
        if num_tokens <= 0 or own_s >= num_tokens * prefill_token_s:
            return None
        return Pull(holder, num_tokens, own_s + worker.pending_pull_tokens * token_s)


def pull_token_s(worker: WorkerView, prefill_token_s: float) -> float:
    """What a worker takes to pull a token, also where it has measured nothing at all."""
    return worker.pull_token_s or prefill_token_s / ASSUMED_PULL_GAIN
