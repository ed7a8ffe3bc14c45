"""Keys of Redis."""

from __future__ import annotations

from millrace.bus.subjects import token
from millrace.schemas.tenants import DEFAULT_CURRENCY, LOCAL_TENANT


def generation_key(request_id: str) -> str:
    """Who runs a request."""
    return f"gen:{request_id}"


def cancels_key(tenant: str) -> str:
    """The requests that services of a tenant cancelled: a sorted set of ids by time."""
    return f"cancels:{token(tenant)}"


def held_key(worker_id: str) -> str:
    """What a worker runs: a hash of leases by request id."""
    return f"held:{worker_id}"


def batch_lease_key(batch_id: str) -> str:
    """The gateway that runs a batch."""
    return f"batch:{batch_id}"


def request_key(request_id: str) -> str:
    """What gateways know of a request."""
    return f"req:{request_id}"


def request_steps_key(request_id: str) -> str:
    """What the tools gave that the gateway ran for a request."""
    return f"req:{request_id}:steps"


def idempotency_key(tenant: str, key: str) -> str:
    """The request that a caller's Idempotency-Key stands for."""
    return f"idem:{token(tenant)}:{key}"


def session_key(tenant: str, session_id: str) -> str:
    """A conversation; those of the keyless tenant go by their id alone."""
    return f"ctx:{_of_session(tenant, session_id)}"


def session_turn_key(tenant: str, session_id: str, request_id: str) -> str:
    """What a request adds to a conversation once it is answered."""
    return f"ctx-turn:{_of_session(tenant, session_id)}:{token(request_id)}"


def session_summary_key(tenant: str, session_id: str) -> str:
    """There while somebody summarises a conversation."""
    return f"ctx-summary:{_of_session(tenant, session_id)}"


def _of_session(tenant: str, session_id: str) -> str:
    if tenant == LOCAL_TENANT:
        return token(session_id)
    return f"{token(tenant)}:{token(session_id)}"


# Accounts, which limits are kept for, are tenants and API keys; months are UTC, as in 202611.

TENANTS_KEY = "tenants"


def tenant_key(tenant: str) -> str:
    """The tenant's record."""
    return f"tenant:{tenant}"


def tenant_api_keys_key(tenant: str) -> str:
    """The ids of the tenant's API keys."""
    return f"tenant-keys:{tenant}"


def api_key_key(key_id: str) -> str:
    """The record of an API key."""
    return f"key:{key_id}"


def tenant_account(tenant: str) -> str:
    return f"t:{tenant}"


def api_key_account(key_id: str) -> str:
    return f"k:{key_id}"


def buckets_key(account: str) -> str:
    """How full the account's buckets of requests and tokens are."""
    return f"lim:{account}"


def running_key(account: str) -> str:
    """The account's requests that run, by the time at which they lapse."""
    return f"run:{account}"


def holds_key(account: str) -> str:
    """What the account's running requests may cost at most."""
    return f"hold:{account}"


CURRENCIES_KEY = "currencies"
"""The currencies but for DEFAULT_CURRENCY in which money was ever set aside."""


def spent_key(account: str, month: str) -> str:
    """The key of an account's spending in a month, in DEFAULT_CURRENCY. With ``currency_suffix``
    after it, it is the key of another currency."""
    return f"spent:{account}:{month}"


def currency_suffix(currency: str) -> str:
    """The mark of a currency in keys and fields: empty for DEFAULT_CURRENCY."""
    return "" if currency == DEFAULT_CURRENCY else f":{currency}"


def reservation_key(request_id: str) -> str:
    """What was set aside for a request that runs."""
    return f"resv:{request_id}"


def booked_key(request_id: str) -> str:
    """The key of the amounts that ended jobs of an unsettled reservation were charged."""
    return f"booked:{request_id}"


def job_reservation(stream_sequence: int, request_id: str) -> str:
    """What ``reservation_key`` is given for a job that a service published: no gateway names one of
    its own so, and no two stored jobs share it, whatever ids they bear."""
    return f"job:{stream_sequence}:{token(request_id)}"


def response_key(tenant: str, response_id: str) -> str:
    """An answer of the Responses API that may be continued, and the conversation before it."""
    return f"resp:{token(tenant)}:{token(response_id)}"


def conversation_key(tenant: str, conversation_id: str) -> str:
    """A conversation that answers of the Responses API are added to."""
    return f"conv:{token(tenant)}:{token(conversation_id)}"


def chat_key(tenant: str, chat_id: str) -> str:
    """What a front end keeps of a conversation."""
    return f"chat:{token(tenant)}:{token(chat_id)}"


def chats_key(tenant: str) -> str:
    """The ids of a tenant's chats, by the time of their last change."""
    return f"chats:{token(tenant)}"


# Adapters by name, and how often they have changed.
ADAPTERS_KEY = "adapters"
ADAPTER_CHANGES_KEY = "adapters:changes"


def former_adapter_key(name: str, version: str) -> str:
    """An adapter that was removed or replaced while requests of it may run."""
    return f"adapter:{token(name)}:{token(version)}"


# Rollouts by model, how often they have changed, and what was seen of them lately.
ROLLOUTS_KEY = "rollouts"
ROLLOUT_CHANGES_KEY = "rollouts:changes"
ROLLOUT_FIGURES_KEY = "rollouts:figures"
