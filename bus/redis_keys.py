"""Redis keys."""

from __future__ import annotations

from millrace.bus.subjects import token
from millrace.schemas.tenants import DEFAULT_CURRENCY, LOCAL_TENANT


def generation_key(request_id: str) -> str:
    """Return the key of a request's worker, epoch and claim."""
    return f"gen:{request_id}"


def cancels_key(tenant: str) -> str:
    """Return the key of a tenant's cancelled requests: a sorted set of ids by time."""
    return f"cancels:{token(tenant)}"


def held_key(worker_id: str) -> str:
    """Return the key of a worker's requests: a hash of leases by request id."""
    return f"held:{worker_id}"


def batch_lease_key(batch_id: str) -> str:
    """Return the key of the gateway that runs a batch."""
    return f"batch:{batch_id}"


def request_key(request_id: str) -> str:
    """Return the key of a request's state at the gateways."""
    return f"req:{request_id}"


def request_steps_key(request_id: str) -> str:
    """Return the key of the results of tools that the gateway ran for a request."""
    return f"req:{request_id}:steps"


def idempotency_key(tenant: str, key: str) -> str:
    """Return the key of the request of a caller's Idempotency-Key."""
    return f"idem:{token(tenant)}:{key}"


def session_key(tenant: str, session_id: str) -> str:
    """Return the key of a conversation; the keyless tenant's key has only the id."""
    return f"ctx:{_of_session(tenant, session_id)}"


def session_turn_key(tenant: str, session_id: str, request_id: str) -> str:
    """Return the key of a request's pending addition to a conversation."""
    return f"ctx-turn:{_of_session(tenant, session_id)}:{token(request_id)}"


def session_summary_key(tenant: str, session_id: str) -> str:
    """Return the key of the lock while a conversation is summarised."""
    return f"ctx-summary:{_of_session(tenant, session_id)}"


def _of_session(tenant: str, session_id: str) -> str:
    if tenant == LOCAL_TENANT:
        return token(session_id)
    return f"{token(tenant)}:{token(session_id)}"


# Limits are kept for accounts: tenants and API keys. Months are UTC, such as 202611.

TENANTS_KEY = "tenants"


def tenant_key(tenant: str) -> str:
    """Return the key of a tenant's record."""
    return f"tenant:{tenant}"


def tenant_api_keys_key(tenant: str) -> str:
    """Return the key of the ids of a tenant's API keys."""
    return f"tenant-keys:{tenant}"


def api_key_key(key_id: str) -> str:
    """Return the key of an API key's record."""
    return f"key:{key_id}"


def tenant_account(tenant: str) -> str:
    return f"t:{tenant}"


def api_key_account(key_id: str) -> str:
    return f"k:{key_id}"


def buckets_key(account: str) -> str:
    """Return the key of an account's buckets of requests and tokens."""
    return f"lim:{account}"


def running_key(account: str) -> str:
    """Return the key of an account's running requests, by the time at which they lapse."""
    return f"run:{account}"


def holds_key(account: str) -> str:
    """Return the key of the highest possible costs of an account's running requests."""
    return f"hold:{account}"


CURRENCIES_KEY = "currencies"
"""Key of the currencies, except DEFAULT_CURRENCY, in which money was ever reserved."""


def spent_key(account: str, month: str) -> str:
    """Return the key of an account's spending in a month, in DEFAULT_CURRENCY.

    With ``currency_suffix`` appended, it is the key of another currency.
    """
    return f"spent:{account}:{month}"


def currency_suffix(currency: str) -> str:
    """Return the suffix of a currency in keys and fields: empty for DEFAULT_CURRENCY."""
    return "" if currency == DEFAULT_CURRENCY else f":{currency}"


def reservation_key(request_id: str) -> str:
    """Return the key of a running request's reservation."""
    return f"resv:{request_id}"


def booked_key(request_id: str) -> str:
    """Return the key of the amounts charged for ended jobs of an unsettled reservation."""
    return f"booked:{request_id}"


def job_reservation(stream_sequence: int, request_id: str) -> str:
    """Return the reservation id of a published job, for ``reservation_key``.

    It differs from all ids of gateways, and from those of other stored jobs with the same request
    id.
    """
    return f"job:{stream_sequence}:{token(request_id)}"


def response_key(tenant: str, response_id: str) -> str:
    """Return the key of a Responses API answer that may be continued, with its conversation."""
    return f"resp:{token(tenant)}:{token(response_id)}"


def conversation_key(tenant: str, conversation_id: str) -> str:
    """Return the key of a Responses API conversation."""
    return f"conv:{token(tenant)}:{token(conversation_id)}"


def chat_key(tenant: str, chat_id: str) -> str:
    """Return the key of a front end's data of a conversation."""
    return f"chat:{token(tenant)}:{token(chat_id)}"


def chats_key(tenant: str) -> str:
    """Return the key of the ids of a tenant's chats, by the time of their last change."""
    return f"chats:{token(tenant)}"


# Adapters by name, and the number of their changes.
ADAPTERS_KEY = "adapters"
ADAPTER_CHANGES_KEY = "adapters:changes"


def former_adapter_key(name: str, version: str) -> str:
    """Return the key of a removed or replaced adapter, kept while its requests may run."""
    return f"adapter:{token(name)}:{token(version)}"


# Rollouts by model, the number of their changes, and their recent figures.
ROLLOUTS_KEY = "rollouts"
ROLLOUT_CHANGES_KEY = "rollouts:changes"
ROLLOUT_FIGURES_KEY = "rollouts:figures"
