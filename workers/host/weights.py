"""Check that all workers of a model serve the same weights, so that streams can move between
them.
"""

from __future__ import annotations

from millrace.bus.api import Bus
from millrace.schemas.errors import MillraceError

# After this silence a worker has ended, or its streams have moved.
_SILENT_NS = 3_000_000_000


class WeightsDifferError(MillraceError, code="weights_differ"):
    """Worker whose weights differ from those of other workers of the same model."""


async def check_weights(bus: Bus, model: str, weights: str | None, now_ns: int) -> None:
    """Check that live workers of ``model`` serve the same ``weights``.

    Workers that do not report weights, as older versions, are ignored. ``now_ns`` is UTC.

    Raises:
        WeightsDifferError: a live worker serves other weights.
    """
    for status in await bus.workers.known():
        if status.model != model or now_ns - status.sent_ns > _SILENT_NS:
            continue
        if None not in (status.weights, weights) and status.weights != weights:
            raise WeightsDifferError(
                f"The worker {status.name} serves the model {model} from "
                f"{_shown(status.weights)}, this one from {_shown(weights)}. Streams cannot move "
                "between them. Use the same checkpoint, quantization and KV cache type for both, "
                "or give one of them another model name."
            )


def _shown(weights: str | None) -> str:
    return f"the weights {weights}" if weights else "unknown weights"
