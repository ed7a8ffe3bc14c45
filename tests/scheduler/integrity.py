"""Consistency checks of a scheduler's counts."""

from __future__ import annotations

from functools import reduce
from operator import xor

from millrace.scheduler.fleet.fleet import Fleet
from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.placement.prefix_index import PrefixIndex
from millrace.scheduler.queues.fair_queue import FairQueue


def check_integrity(checked: Fleet | WorkerView | PrefixIndex | FairQueue) -> None:
    """Raise AssertionError unless counts, sets and lists agree."""
    match checked:
        case Fleet():
            _check_fleet(checked)
        case WorkerView():
            _check_worker(checked)
        case PrefixIndex():
            _check_prefixes(checked)
        case FairQueue():
            _check_queue(checked)


def _check_fleet(fleet: Fleet) -> None:
    named = {(name, worker_id) for name, ids in fleet._by_name.items() for worker_id in ids}
    assert named == {(one.status.name, one.worker_id) for one in fleet._workers.values()}
    for worker_id in fleet._workers:
        assert fleet._past.get(worker_id) != float("inf"), "a retired worker is alive"
    indexed = [view for views in fleet._by_model.values() for view in views.values()]
    assert sorted(map(id, indexed)) == sorted(map(id, fleet._workers.values()))
    for worker in fleet._workers.values():
        _check_worker(worker)


def _check_worker(worker: WorkerView) -> None:
    runs = worker.runs.values()
    assert worker._promised_blocks == sum(run.num_blocks for run in runs)
    assert worker._unseen_blocks == sum(run.num_blocks for run in runs if not run.seen)
    for rank, own in enumerate(worker._own):
        assert own == sum(run.rank == rank for run in runs)
    assert worker.num_held == sum(worker._own) + sum(worker._others)


def _check_prefixes(index: PrefixIndex) -> None:
    assert index._num_keys == sum(holder.num_keys for holder in index._holders.values())
    assert index._num_keys <= index._max_keys
    assert all(index._masks.values()), "a key that no worker has"
    bits = 0
    for worker_id, holder in index._holders.items():
        assert index._by_bit[holder.bit] == worker_id
        has = {key for key, mask in index._masks.items() if mask & holder.bit}
        assert len(has) == holder.num_keys
        assert has <= set(holder.order)
        assert holder.digest == reduce(xor, has, 0)
        bits |= holder.bit
    assert all(mask | bits == bits for mask in index._masks.values()), "a key of a gone worker"


def _check_queue(queue: FairQueue) -> None:
    waiting = queue._queued
    assert not queue._passed, "a job is skipped for good"
    assert waiting <= queue._members.keys(), "what is gone is queued"
    for tenant, jobs in queue._tenant_jobs.items():
        count = sum(scheduled.tenant == tenant for scheduled in waiting)
        assert len(jobs) == count, f"{tenant} counts {len(jobs)} jobs of {count}"
        is_ready = tenant.name in queue._ready[tenant.tier]
        assert is_ready == bool(count), f"{tenant} is not ready"
        assert count or tenant in queue._wanted, f"{tenant} wants nothing"
    assert sum(map(len, queue._tenant_jobs.values())) == len(waiting)
