"""Headers of responses: their descriptions in the OpenAPI document, and which of them web pages may
read.

Every header that the gateway sets is in a group here, which a test checks.
"""

from __future__ import annotations

from millrace.schemas.json_schema import Schema

_STRING: Schema = {"type": "string"}
RATE_LIMITS: dict[str, Schema] = {
    f"x-ratelimit-{aspect}-{what}": {
        "description": text.format(what=what),
        "schema": {"type": "string" if aspect == "reset" else "integer"},
    }
    for what in ("requests", "tokens")
    for aspect, text in (
        ("limit", "Limit of {what} per minute, if there is one."),
        ("remaining", "Number of {what} left now."),
        ("reset", "Time until all {what} are available again, such as 6m0s."),
    )
}
ROUTED: dict[str, Schema] = {
    "x-millrace-model": {"description": "The model that answers.", "schema": _STRING},
    "x-millrace-route-reason": {
        "description": "The reason for the model, if the request left the choice.",
        "schema": _STRING,
    },
}
HEADERS: dict[str, Schema] = {
    "x-request-id": {
        "description": "The X-Request-Id of the request, if it has 1 to 128 visible ASCII "
        "characters; otherwise the id of the request here.",
        "schema": _STRING,
    },
    "x-millrace-request-id": {
        "description": "The id of the request here, if x-request-id is the client's.",
        "schema": _STRING,
    },
    "Retry-After": {
        "description": "Seconds to wait before a retry.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-should-retry": {
        "description": "True if the same request may succeed soon, as with Retry-After; false "
        "if it will fail again.",
        "schema": {"type": "boolean"},
    },
    **RATE_LIMITS,
    **ROUTED,
}
# Headers of Anthropic's API, of notices, and of tracing.
_UNDOCUMENTED = ("request-id", "x-millrace-notice", "traceparent", "x-trace-id")

EXPOSED = ", ".join([*HEADERS, *_UNDOCUMENTED]).lower().encode()
"""The value of ``access-control-expose-headers``."""
