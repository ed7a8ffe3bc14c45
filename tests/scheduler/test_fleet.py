"""The pure parts: fleet, placement, cancels, throughput, epochs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bus.api import LeasedJob
from scheduler import placement
from scheduler.backlog import Backlog
from scheduler.cancels import CancelMemory
from scheduler.entry import Entry
from scheduler.fleet import Departure, Fleet
from scheduler.need import Need
from scheduler.throughput import Throughput, eta_s, retry_after_s
from scheduler.worker_view import WorkerView
from schemas.control import CancelReason, WorkerStatus
from tests.scheduler.world import LINE, job

_NOW_NS = 1_700_000_000_000_000_000


def status(worker_id: str = "w-1", name: str = "", **changes: object) -> WorkerStatus:
    fields: dict[str, object] = {
        "worker_id": worker_id,
        "name": name or worker_id.split("-")[0],
        "model": "m",
        "max_num_sequences": 4,
        "num_blocks": 100,
        "num_free_blocks": 100,
        "started_ns": _NOW_NS,
        "sent_ns": _NOW_NS,
    } | changes
    return WorkerStatus(**fields)  # type: ignore[arg-type]


def fleet_of(*statuses: WorkerStatus) -> Fleet:
    fleet = Fleet(2.0)
    for one in statuses:
        fleet.observe(one, 0.0, _NOW_NS)
    return fleet


def test_a_worker_is_gone_after_its_silence() -> None:
    fleet = fleet_of(status())
    fleet.reserve("w-1", "r1", Need(10, 10))
    assert fleet.expire(1.9) == []
    (gone,) = fleet.expire(2.0)
    assert (gone.worker_id, gone.why, gone.request_ids) == ("w-1", Departure.SILENT, ("r1",))
    assert fleet.num_workers("m") == 0
    fleet.observe(status(), 3.0, _NOW_NS)
    assert fleet.num_workers("m") == 1, "it was only silent"


def test_a_new_life_ends_the_former_for_good() -> None:
    fleet = fleet_of(status("w-1"))
    (gone,) = fleet.observe(status("w-2", started_ns=_NOW_NS + 1), 0.1, _NOW_NS)
    assert (gone.worker_id, gone.why) == ("w-1", Departure.RESTARTED)
    assert fleet.observe(status("w-1"), 0.2, _NOW_NS) == []
    assert [worker.worker_id for worker in fleet.of_model("m")] == ["w-2"]
    fleet.check_integrity()


def test_an_older_life_does_not_take_the_name_back() -> None:
    fleet = fleet_of(status("w-2", started_ns=_NOW_NS))
    assert fleet.observe(status("w-1", started_ns=_NOW_NS - 5), 0.1, _NOW_NS) == []
    assert [worker.worker_id for worker in fleet.of_model("m")] == ["w-2"]


def test_a_retired_worker_stays_away() -> None:
    fleet = fleet_of(status())
    (gone,) = fleet.observe(status(retired=True), 0.1, _NOW_NS)
    assert gone.why is Departure.RETIRED
    fleet.observe(status(), 0.2, _NOW_NS)
    assert fleet.num_workers("m") == 0


def test_what_a_dead_worker_left_in_the_bucket_is_no_worker() -> None:
    old = status(sent_ns=_NOW_NS - 3_000_000_000)
    fleet = fleet_of(old)
    assert fleet.num_workers("m") == 0
    fleet.observe(old, 0.1, _NOW_NS)
    assert fleet.num_workers("m") == 0
    fleet.observe(status(sent_ns=_NOW_NS - 2_500_000_000), 0.2, _NOW_NS)
    assert fleet.num_workers("m") == 1, "its clock is behind ours"


def test_forgiven_workers_have_their_whole_time_again() -> None:
    fleet = fleet_of(status())
    fleet.forgive(10.0)
    assert fleet.expire(11.9) == []


def test_room_counts_what_was_sent_since_the_heartbeat() -> None:
    fleet = fleet_of(status(num_running=1))
    assert fleet.room("m") == 3
    fleet.reserve("w-1", "r1", Need(10, 10))
    fleet.reserve("w-1", "r2", Need(10, 10))
    assert fleet.room("m") == 1
    fleet.confirm("w-1", "r1")
    fleet.observe(status(num_running=3), 0.5, _NOW_NS)
    assert fleet.room("m") == 1, "one of them is another scheduler's"
    fleet.release("w-1", "r1")
    assert fleet.room("m") == 2


def test_a_refusal_holds_until_the_next_heartbeat() -> None:
    fleet = fleet_of(status())
    fleet.reserve("w-1", "r1", Need(10, 10))
    fleet.release("w-1", "r1")
    fleet.refuse("w-1")
    assert fleet.room("m") == 0
    fleet.observe(status(), 0.5, _NOW_NS)
    assert fleet.room("m") == 4


def test_waiting_room_is_used_after_free_slots() -> None:
    full = status("a-1", num_running=4, max_num_waiting=2)
    free = status("b-1", num_running=3, outstanding_tokens=10_000)
    fleet = fleet_of(full, free)
    assert fleet.room("m") == 3
    chosen = placement.choose(fleet.of_model("m"), Need(10, 10))
    assert chosen is not None
    assert chosen.worker_id == "b-1"


def test_a_worker_that_reports_less_for_long_is_doubtful() -> None:
    fleet = fleet_of(status())
    fleet.reserve("w-1", "r1", Need(10, 10))
    fleet.confirm("w-1", "r1")
    fleet.observe(status(), 0.5, _NOW_NS)
    assert not list(fleet.doubtful())
    fleet.observe(status(), 2.6, _NOW_NS)
    assert [worker.worker_id for worker in fleet.doubtful()] == ["w-1"]


_STATUSES = st.builds(
    lambda slots, running, blocks, used, outstanding, draining, longest: status(
        max_num_sequences=slots,
        num_running=running,
        num_blocks=blocks,
        num_free_blocks=max(0, blocks - used),
        outstanding_tokens=outstanding,
        draining=draining,
        max_tokens_per_request=longest,
    ),
    slots=st.integers(1, 8),
    running=st.integers(0, 10),
    blocks=st.integers(0, 50),
    used=st.integers(0, 60),
    outstanding=st.integers(0, 10_000),
    draining=st.booleans(),
    longest=st.sampled_from([0, 64, 512]),
)


@given(
    statuses=st.lists(_STATUSES, max_size=6),
    need=st.builds(Need, st.integers(1, 600), st.integers(1, 600)),
)
def test_the_choice_fits_and_is_the_least_loaded(statuses: list[WorkerStatus], need: Need) -> None:
    views = [WorkerView(one, 0.0) for one in statuses]
    chosen = placement.choose(views, need)
    fitting = [view for view in views if view.fits(need)]
    if chosen is None:
        assert not fitting
        return
    assert chosen.room > 0
    assert not chosen.status.draining
    assert chosen.could_hold(need)
    same_kind = [view for view in fitting if view.has_free_slot == chosen.has_free_slot]
    assert chosen.outstanding_tokens == min(view.outstanding_tokens for view in same_kind)
    if not chosen.has_free_slot:
        assert not any(view.has_free_slot for view in fitting)


@given(needs=st.lists(st.builds(Need, st.integers(1, 300), st.integers(1, 300)), max_size=40))
def test_placing_in_one_heartbeat_never_overfills(needs: list[Need]) -> None:
    fleet = fleet_of(status("a-1"), status("b-1", num_blocks=40, num_free_blocks=40))
    for number, need in enumerate(needs):
        worker = placement.choose(fleet.of_model("m"), need)
        if worker is None:
            continue
        was_idle = worker.num_held == 0
        fleet.reserve(worker.worker_id, f"r{number}", need)
        assert worker.num_held <= worker.status.max_num_sequences
        assert was_idle or worker.num_free_blocks >= 0


def test_cancels_are_forgotten_in_time_and_bounded() -> None:
    memory = CancelMemory(10.0, max_remembered=2)
    memory.add("a", CancelReason.CLIENT, 0.0)
    memory.add("a", CancelReason.DEADLINE, 1.0)
    assert memory.reason("a", 10.5) is CancelReason.CLIENT
    assert memory.reason("a", 11.0) is None
    for name in "bcd":
        memory.add(name, CancelReason.CLIENT, 2.0)
    assert len(memory) == 2
    assert memory.reason("b", 2.0) is None


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
    leased = LeasedJob(job=job("r1"), lease="l", num_deliveries=1, stream_sequence=1, line=LINE)
    entry = Entry.of(leased, Backlog(), 0.0)
    epochs = []
    for _ in range(3):
        entry.begin_run(0.0)
        epochs.append(entry.epoch)
    before = entry.epoch
    entry.begin_run(0.0)
    entry.undo_run(before)
    assert entry.next_epoch == 4
    entry.num_deliveries = 2
    entry.begin_run(0.0)
    epochs.append(entry.epoch)
    entry.epoch_floor = 500
    assert epochs == sorted(set(epochs)) == [1, 2, 3, 68]
    assert entry.next_epoch == 501
