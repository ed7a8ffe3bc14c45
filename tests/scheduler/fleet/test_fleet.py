"""Fleet state: live workers, cancels, throughput, epochs."""

from __future__ import annotations

from millrace.bus.job_queue import LeasedJob
from millrace.scheduler.fleet.fleet import Departure, Fleet
from millrace.scheduler.jobs.cancels import CancelMemory
from millrace.scheduler.jobs.scheduled_job import ResourceRequest, ScheduledJob, TenantQueueCounts
from millrace.scheduler.queues.measurements import Throughput, eta_s, retry_after_s
from millrace.schemas.control import Cancel, CancelReason, WorkerStatus
from tests.scheduler.integrity import check_integrity
from tests.scheduler.statuses import NOW_NS, status, view_of
from tests.scheduler.world import TENANT_QUEUE, job


def fleet_of(*statuses: WorkerStatus) -> Fleet:
    fleet = Fleet(2.0)
    for one in statuses:
        fleet.observe(one, 0.0, NOW_NS)
    return fleet


def test_a_worker_is_gone_after_its_silence() -> None:
    fleet = fleet_of(status())
    view_of(fleet, "w-1").reserve("r1", ResourceRequest(10, 10))
    assert fleet.expire(1.9) == []
    (gone,) = fleet.expire(2.0)
    assert (gone.worker_id, gone.why, gone.request_ids) == ("w-1", Departure.SILENT, ("r1",))
    assert fleet.num_workers("m") == 0
    fleet.observe(status(), 3.0, NOW_NS)
    assert fleet.num_workers("m") == 1, "it was only silent"


def test_a_new_life_ends_the_former() -> None:
    fleet = fleet_of(status("w-1"))
    (gone,) = fleet.observe(status("w-2", started_ns=NOW_NS + 1), 0.1, NOW_NS)
    assert (gone.worker_id, gone.why) == ("w-1", Departure.RESTARTED)
    assert fleet.observe(status("w-1"), 0.2, NOW_NS) == [], "that was on its way"
    assert [worker.worker_id for worker in fleet.of_model("m")] == ["w-2"]
    check_integrity(fleet)


def test_a_former_life_that_is_heard_again_is_used_again() -> None:
    """Two workers of one name both run, despite the rule for names."""
    fleet = fleet_of(status("w-1"))
    fleet.observe(status("w-2", started_ns=NOW_NS + 1), 0.1, NOW_NS)
    for now_s in (0.6, 1.1, 1.6):
        fleet.observe(status("w-1"), now_s, NOW_NS)
    assert fleet.num_workers("m") == 1
    assert fleet.observe(status("w-1"), 2.1, NOW_NS) == []
    assert fleet.observe(status("w-2", started_ns=NOW_NS + 1), 2.2, NOW_NS) == []
    assert sorted(worker.worker_id for worker in fleet.of_model("m")) == ["w-1", "w-2"]
    check_integrity(fleet)
    (gone,) = fleet.observe(status("w-2", retired=True), 2.3, NOW_NS)
    assert gone.worker_id == "w-2"
    fleet.observe(status("w-1"), 2.6, NOW_NS)
    assert [worker.worker_id for worker in fleet.of_model("m")] == ["w-1"]
    ended = fleet.observe(status("w-3", started_ns=NOW_NS + 2), 2.7, NOW_NS)
    assert [one.worker_id for one in ended] == ["w-1"], "a new life ends it once more"
    check_integrity(fleet)


def test_an_older_life_does_not_take_the_name_back() -> None:
    fleet = fleet_of(status("w-2", started_ns=NOW_NS))
    assert fleet.observe(status("w-1", started_ns=NOW_NS - 5), 0.1, NOW_NS) == []
    assert [worker.worker_id for worker in fleet.of_model("m")] == ["w-2"]


def test_a_retired_worker_stays_away() -> None:
    fleet = fleet_of(status())
    (gone,) = fleet.observe(status(retired=True), 0.1, NOW_NS)
    assert gone.why is Departure.RETIRED
    fleet.observe(status(), 0.2, NOW_NS)
    assert fleet.num_workers("m") == 0


def test_what_a_dead_worker_left_in_the_bucket_is_no_worker() -> None:
    old = status(sent_ns=NOW_NS - 3_000_000_000)
    fleet = fleet_of(old)
    assert fleet.num_workers("m") == 0
    fleet.observe(old, 0.1, NOW_NS)
    assert fleet.num_workers("m") == 0
    fleet.observe(status(sent_ns=NOW_NS - 2_500_000_000), 0.2, NOW_NS)
    assert fleet.num_workers("m") == 1, "its clock is behind ours"


def test_forgiven_workers_have_their_whole_time_again() -> None:
    fleet = fleet_of(status())
    fleet.forgive(10.0)
    assert fleet.expire(11.9) == []


def test_a_worker_that_reports_less_for_long_is_doubtful() -> None:
    fleet = fleet_of(status())
    view_of(fleet, "w-1").reserve("r1", ResourceRequest(10, 10))
    view_of(fleet, "w-1").confirm("r1")
    fleet.observe(status(), 0.5, NOW_NS)
    assert not list(fleet.doubtful())
    fleet.observe(status(), 2.6, NOW_NS)
    assert [worker.worker_id for worker in fleet.doubtful()] == ["w-1"]


def test_cancels_are_forgotten_in_time_and_bounded() -> None:
    memory = CancelMemory(10.0, max_remembered=2)
    memory.add(Cancel(request_id="a"), 0.0)
    memory.add(Cancel(request_id="a", reason=CancelReason.DEADLINE), 1.0)
    assert memory.reason("acme", "a", 10.5) is CancelReason.CLIENT
    assert memory.reason("acme", "a", 11.0) is None
    for name in "bcd":
        memory.add(Cancel(request_id=name), 2.0)
    assert len(memory) == 2
    assert memory.reason("acme", "b", 2.0) is None


def test_cancels_of_a_tenant_count_for_its_jobs_and_push_out_its_own_only() -> None:
    memory = CancelMemory(10.0, max_remembered=2)
    memory.add(Cancel(request_id="a", tenant="acme"), 0.0)
    memory.add(Cancel(request_id="b"), 0.0)
    for name in "abcd":
        memory.add(Cancel(request_id=name, tenant="shop"), 1.0)
    assert memory.reason("acme", "a", 2.0) is CancelReason.CLIENT
    assert memory.reason("acme", "d", 2.0) is None
    assert memory.reason("acme", "b", 2.0) is CancelReason.CLIENT
    assert memory.reason("shop", "d", 2.0) is CancelReason.CLIENT
    assert memory.reason("shop", "a", 2.0) is None


def test_cancels_of_tenants_that_send_none_any_more_are_forgotten() -> None:
    memory = CancelMemory(10.0)
    for number in range(100):
        memory.add(Cancel(request_id="a", tenant=f"t{number}"), 0.0)
        memory.add(Cancel(request_id="b", tenant=f"t{number}"), 0.0)
    memory.add(Cancel(request_id="c", tenant="t0"), 9.0)
    memory.add(Cancel(request_id="d"), 10.0)
    assert memory.reason("t0", "c", 10.0) is CancelReason.CLIENT
    assert len(memory) == 4  # the older two of t0 go with its next cancel


def test_throughput_over_the_last_seconds() -> None:
    throughput = Throughput()
    assert throughput.per_s(0.0) == 0.0
    for tenth in range(100):
        throughput.add(2, tenth / 10)
    assert 19 <= throughput.per_s(9.9) <= 21
    assert throughput.per_s(100.0) == 0.0
    assert eta_s(0, 0.0) == 0.0
    assert eta_s(10, 0.0) is None
    assert retry_after_s(100, 100, 10.0) == 2.5
    assert 0 < retry_after_s(100, 100, 0.0) <= 60


def test_epochs_rise_over_attempts_and_deliveries() -> None:
    leased = LeasedJob(
        job=job("r1"), lease="l", num_deliveries=1, stream_sequence=1, tenant_queue=TENANT_QUEUE
    )
    scheduled = ScheduledJob.of(leased, TenantQueueCounts(), 0.0)
    epochs = []
    for _ in range(3):
        scheduled.start_attempt(0.0)
        epochs.append(scheduled.attempts.epoch)
    before = scheduled.attempts.epoch
    scheduled.start_attempt(0.0)
    scheduled.undo_attempt(before)
    assert scheduled.next_epoch == 4
    scheduled.lease.num_deliveries = 2
    scheduled.start_attempt(0.0)
    epochs.append(scheduled.attempts.epoch)
    scheduled.attempts.epoch_floor = 500
    assert epochs == sorted(set(epochs)) == [1, 2, 3, 68]
    assert scheduled.next_epoch == 501
