"""Headers of responses: what the OpenAPI document says of them, and which ones web pages may read.

Every header that the gateway sets is in a group here. A test holds that.
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
        ("limit", "How many {what} a minute are allowed, if there is a limit."),
        ("remaining", "How many {what} are left now."),
        ("reset", "When all {what} are back, such as 6m0s."),
    )
}
ROUTED: dict[str, Schema] = {
    "x-millrace-model": {"description": "The model that answers.", "schema": _STRING},
    "x-millrace-route-reason": {
        "description": "Why it is that one, if the request left the choice.",
        "schema": _STRING,
    },
}
HEADERS: dict[str, Schema] = {
    "x-request-id": {
        "description": "The X-Request-Id of the request, if it has 1 to 128 visible ASCII "
        "characters; else the id under which the request is known here.",
        "schema": _STRING,
    },
    "x-millrace-request-id": {
        "description": "The id under which the request is known here, if x-request-id is the "
        "client's.",
        "schema": _STRING,
    },
    "Retry-After": {
        "description": "Seconds after which it may be tried again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-should-retry": {
        "description": "Whether the same request may succeed soon: true beside Retry-After, false "
        "where it fails again.",
        "schema": {"type": "boolean"},
    },
    **RATE_LIMITS,
    **ROUTED,
}
# Of Anthropic's API, of messages that were read with a notice, and of tracing.
_UNDOCUMENTED = ("request-id", "x-millrace-notice", "traceparent", "x-trace-id")

EXPOSED = ", ".join([*HEADERS, *_UNDOCUMENTED]).lower().encode()
"""The value of ``access-control-expose-headers``."""
