"""Users and permissions of a NATS server: ``python -m millrace.bus.nats.accounts``.

Writes nats-server's configuration: one user for each part, and one for each ``--service``, a
tenant's service that publishes its own jobs. Passwords are variables of the server's environment,
plain or as bcrypt hashes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from millrace.bus.nats.permissions import Grants, Part, grants_of, grants_of_service
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import check_tenant, own_reply

_ACCOUNT = "MILLRACE"
# A telemetry query is the longest request.
_ANSWER_WITHIN = "1m"


class TenantService(NamedTuple):
    """Tenant's service with the tiers that it may publish in."""

    tenant: str
    tiers: tuple[Tier, ...]
    replies: tuple[str, ...] = ()

    @property
    def user(self) -> str:
        return f"service-{self.tenant}"


def text(services: Sequence[TenantService] = ()) -> str:
    """Return the configuration for nats-server to include."""
    users = [_user(part.value, grants_of(part)) for part in Part]
    users += [_user(one.user, grants_of_service(*one)) for one in services]
    return (
        "# Made by: python -m millrace.bus.nats.accounts. Include it in nats-server's "
        "configuration.\n"
        f"accounts {{\n  {_ACCOUNT} {{\n    jetstream: enabled\n    users: [\n"
        + "".join(users)
        + "    ]\n  }\n}\n"
    )


def password_variable(user: str) -> str:
    """Return the environment variable with a user's password."""
    return f"NATS_{re.sub('[^A-Z0-9]', '_', user.upper())}_PASSWORD"


def parse_service(argument: str) -> TenantService:
    """Parse ``tenant=tier,tier[:reply,reply]``. Raises argparse.ArgumentTypeError."""
    tenant, _, rest = argument.partition("=")
    tiers, _, replies = rest.partition(":")
    try:
        check_tenant(tenant)
        return TenantService(
            tenant,
            tuple(Tier(tier) for tier in tiers.split(",")),
            tuple(own_reply(tenant, name) for name in replies.split(",") if name),
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{argument}: {error}") from error


def _user(name: str, grants: Grants) -> str:
    answers = f'          allow_responses {{ max: 1, expires: "{_ANSWER_WITHIN}" }}\n'
    return (
        f'      {{\n        user: "{name}"\n        password: ${password_variable(name)}\n'
        "        permissions {\n"
        + _allowed("publish", grants.publish)
        + _allowed("subscribe", grants.subscribe)
        + (answers if grants.answers else "")
        + "        }\n      }\n"
    )


def _allowed(what: str, subjects: Sequence[str]) -> str:
    lines = "".join(f'            "{subject}"\n' for subject in dict.fromkeys(subjects))
    return f"          {what}: [\n{lines}          ]\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the configuration to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.bus.nats.accounts", description=__doc__
    )
    parser.add_argument(
        "--service",
        action="append",
        default=[],
        type=parse_service,
        metavar="TENANT=TIER[,TIER][:REPLY]",
        help="a tenant's service and the tiers that it may publish in; may be repeated",
    )
    parsed = parser.parse_args(arguments)
    sys.stdout.write(text(parsed.service))


if __name__ == "__main__":
    main()
