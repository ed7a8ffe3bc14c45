"""The operations of rollouts, which administrators start and turn back."""

from __future__ import annotations

from millrace.gateway.openapi.operation import get, post
from millrace.schemas.models.rollouts import RolloutList, RolloutReport, StartRolloutRequest

ROLLOUTS = (
    get(
        "/v1/rollouts",
        "listRollouts",
        "The latest rollout of each model, for administrators",
        RolloutList,
    ),
    post(
        "/v1/rollouts",
        "startRollout",
        "Move the traffic of a model to another version of it, for administrators",
        RolloutReport,
        body=StartRolloutRequest,
        example={
            "version": "chat@v2",
            "canary_percent": 10,
            "step_percent": 20,
            "interval_s": 300,
            "abort_if": "error_rate>0.01 or ttft_p95>1.5x",
        },
        own_errors=(404, 409),
    ),
    get(
        "/v1/rollouts/{model}",
        "getRollout",
        "The latest rollout of a model, for administrators",
        RolloutReport,
    ),
    post(
        "/v1/rollouts/{model}/rollback",
        "rollBack",
        "Give the traffic of a model back to the version that had it, for administrators",
        RolloutReport,
        own_errors=(409,),
    ),
)
