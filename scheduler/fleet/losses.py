"""Workers that are gone, as records."""

from __future__ import annotations

from millrace.scheduler.fleet.fleet import Departed, Departure
from millrace.schemas.records import LossCause, LossObserver, WorkerLossRecord

_CAUSES = {
    Departure.RETIRED: LossCause.STOPPED,
    Departure.SILENT: LossCause.SILENT,
    Departure.RESTARTED: LossCause.REPLACED,
}


def loss_of(gone: Departed) -> WorkerLossRecord:
    """The record of a worker that is gone: the same whichever scheduler makes it."""
    status = gone.status
    return WorkerLossRecord(
        worker_id=gone.worker_id,
        name=gone.name,
        model=status.model,
        lost_ns=status.sent_ns,
        cause=_CAUSES[gone.why],
        observer=LossObserver.SCHEDULER,
        num_requests=status.num_running + status.num_waiting,
    )
