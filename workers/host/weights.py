"""Workers of one model serve the same weights, or a stream that moves would go on as another's."""

from __future__ import annotations

from millrace.bus.api import Bus
from millrace.schemas.errors import MillraceError

# A worker that was silent for so long has ended, or its streams have moved.
_SILENT_NS = 3_000_000_000


class WeightsDifferError(MillraceError, code="weights_differ"):
    """Another worker serves other weights as the same model."""


async def check_weights(bus: Bus, model: str, weights: str | None, now_ns: int) -> None:
    """Raise WeightsDifferError if a live worker of ``model`` serves others than ``weights``. Those
    that do not say, as workers of an older version, do not count. ``now_ns`` is UTC."""
    for status in await bus.workers.known():
        if status.model != model or now_ns - status.sent_ns > _SILENT_NS:
            continue
        if None not in (status.weights, weights) and status.weights != weights:
            raise WeightsDifferError(
                f"The worker {status.name} serves the model {model} from "
                f"{_shown(status.weights)}, this one from {_shown(weights)}. Streams could not "
                "move between them: give both the same checkpoint, quantization and type of KV "
                "cache, or one of them another model name."
            )


def _shown(weights: str | None) -> str:
    return f"the weights {weights}" if weights else "weights that nobody can tell"
