"""Workers of one model serve the same weights, or a stream that moves would go on as another's."""

from __future__ import annotations

from bus.api import Bus
from schemas.control import WorkerStatus
from schemas.errors import MillraceError

# A worker that was silent for so long has ended, or its streams have moved.
_SILENT_S = 3.0


class WeightsDifferError(MillraceError, code="weights_differ"):
    """Another worker serves other weights as the same model."""


async def check_weights(bus: Bus, model: str, weights: str | None) -> None:
    """Raise WeightsDifferError if a live worker of ``model`` serves others than ``weights``. Those
    that do not say, as workers of an older version, do not count."""
    heard: dict[str, WorkerStatus] = {}

    def note(status: WorkerStatus) -> None:
        heard[status.worker_id] = status

    subscription = await bus.workers.watch(note)
    await subscription.close()
    silences_s = await bus.workers.silences_s()
    for status in heard.values():
        is_silent = silences_s.get(status.worker_id, 0.0) > _SILENT_S
        if status.model != model or status.retired or is_silent:
            continue
        if None not in (status.weights, weights) and status.weights != weights:
            raise WeightsDifferError(
                f"The worker {status.name} serves the model {model} from "
                f"{_shown(status.weights)}, this one from {_shown(weights)}. Streams could not "
                f"move between them: give one of the two another model name."
            )


def _shown(weights: str | None) -> str:
    return f"the weights {weights}" if weights else "weights that nobody can tell"
