"""Declared limits: each holds, can be set, and is shown by every part of Millrace.

A limit is declared in ``millrace.schemas.tenants``. ``docs/extending.md`` lists the further steps.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.bus.tenancy.accounts import Account, AccountUsage, remaining
from millrace.cli.keys.reports import as_table, as_text, key_report, tenant_report
from millrace.cli.main import build_parser
from millrace.gateway.api.system import account_limits
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.tenancy.limits import Limiter
from millrace.schemas.errors import MillraceError
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import (
    BUDGET,
    KEY_LIMITS,
    LIMITS,
    KeyRecord,
    LimitOverrides,
    LimitSet,
    Remaining,
    TenantRecord,
    TierLimits,
)
from tests.support.limit_bench import LimitBench, reserve
from tests.support.servers import RedisServer

_DOCS = Path(__file__).parents[3] / "docs"
# A size that no tier has.
_SIZE = 4_711


def _size(name: str, count: int) -> Any:
    return Decimal(count) if name == BUDGET else count


async def _reserve_twice(limiter: Limiter, caller: Caller) -> None:
    for number in range(2):
        await reserve(limiter, caller, f"r{number}", cost="2")


@pytest.fixture
async def bench(redis_server: RedisServer) -> AsyncIterator[LimitBench]:
    made = LimitBench(redis_server.url)
    await made.link.call("FLUSHALL")
    yield made
    await made.close()


def test_each_limit_can_be_overridden_and_has_a_rest() -> None:
    assert tuple(LIMITS) == LimitSet.__struct_fields__ == LimitOverrides.__struct_fields__
    assert Remaining.__struct_fields__ == KEY_LIMITS
    for name in LIMITS:
        assert LimitOverrides(**{name: None}).given() == {name: None}


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_has_bounds(name: str) -> None:
    for size in (_size(name, -1), _size(name, 10**15)):
        for kind in (LimitSet, LimitOverrides):
            with pytest.raises(ValueError, match=f"{name} must be between"):
                kind(**{name: size})


@pytest.mark.parametrize("with_redis", [True, False])
@pytest.mark.parametrize("name", KEY_LIMITS)
async def test_each_limit_refuses_a_request_by_its_name(
    bench: LimitBench, name: str, with_redis: bool
) -> None:
    """Two requests of 100 tokens that cost 2 are over any limit of 1."""
    if with_redis:
        await bench.tenant("acme", **{name: _size(name, 1)})
        caller, limiter = await bench.caller("acme"), bench.limiter
    else:
        tiers = TierLimits(pro=LimitSet(**{name: _size(name, 1)}))
        config = msgspec.structs.replace(bench.config, tiers=tiers)
        caller = msgspec.structs.replace(
            await bench.caller("acme"), tier=Tier.PRO, context_tokens=tiers.pro.context_tokens
        )
        limiter = Limiter(None, config, bench.clock)
    with pytest.raises(MillraceError) as refused:
        await _reserve_twice(limiter, caller)
    assert getattr(refused.value, "limit", "") == name


@pytest.mark.parametrize("name", KEY_LIMITS)
def test_the_rest_of_each_limit_is_shown(name: str) -> None:
    account = Account(kind="tenant", name="acme", limits=LimitSet(**{name: _size(name, _SIZE)}))
    left = msgspec.to_builtins(account_limits(account, AccountUsage()).remaining)
    assert {of for of, rest in left.items() if rest is not None} == {name}
    assert str(_SIZE) in str(left[name])
    assert getattr(remaining(account, AccountUsage()), name) is not None


@pytest.mark.parametrize("name", LIMITS)
def test_the_command_line_sets_and_shows_each_limit(name: str) -> None:
    option = [f"--{name.replace('_', '-')}", str(_SIZE)]
    given = build_parser().parse_args(["keys", "tenant", "acme", *option])
    assert getattr(given, name) == _size(name, _SIZE)
    limits, tiers = LimitOverrides(**{name: _size(name, _SIZE)}), TierLimits()
    shown = as_text(tenant_report("acme", TenantRecord(limits=limits), tiers, "", None))
    assert re.search(rf"{name} +{_SIZE}\b.*set for this tenant", shown)
    key = KeyRecord(key_id="k", digest="", tenant="acme", limits=limits)
    told = f"{_SIZE} {'USD ' if name == BUDGET else ''}{LIMITS[name].unit}"
    assert (told in as_table([key_report(key, TenantRecord(), tiers)])) == (name in KEY_LIMITS)


def test_the_page_of_limits_has_each_limit_with_its_defaults() -> None:
    page = (_DOCS / "tenants.md").read_text(encoding="utf-8")
    tiers = TierLimits()
    for name in LIMITS:
        sizes = [
            getattr(tiers.of(Tier(tier)), name) for tier in ("free", "pro", "enterprise", "batch")
        ]
        row = " | ".join("none" if size is None else f"{size:,}" for size in sizes)
        assert f"| `{name}` | {row} |" in page
