"""On whose behalf a request is made."""

from __future__ import annotations

import msgspec

from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import LOCAL_TENANT


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant and the key that it came with (empty: none, which is for loopback only).

    ``tier`` is the most urgent one that its requests may have; ``context_tokens`` bounds prompt
    and completion of a request together (None: the model's window does). An admin may see other
    tenants' figures.
    """

    tenant: str = LOCAL_TENANT
    tier: Tier = Tier.ENTERPRISE
    key_id: str = ""
    context_tokens: int | None = None
    is_admin: bool = False


LOCAL = Caller(is_admin=True)
