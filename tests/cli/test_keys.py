"""``millrace keys`` on a real redis-server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from millrace.cli.main import main
from millrace.gateway.tenancy.identity import AuthenticationError, Caller, Identity
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.jobs import Tier
from millrace.schemas.tenants import TierLimits
from tests.support.manual_clock import ManualClock
from tests.support.servers import RedisServer, free_port


class Keys:
    """The command, as a person runs it."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        """Run a command that must succeed, and return its output."""
        code, out, err = self.run(*arguments)
        assert code == 0, err
        return out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["keys", *arguments, "--redis", self.url])
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def keys(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> Keys:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return Keys(redis_server.url, capsys)


async def caller_of(url: str, token: str) -> Caller:
    link = RedisLink(RedisConfig(url=url))
    try:
        identity = Identity(link, GatewayConfig(host="0.0.0.0"), SystemClock())
        return await identity.caller_of_token(token)
    finally:
        await link.close()


def test_a_life_of_a_key(keys: Keys) -> None:
    code, out, err = keys.run("create", "--tenant", "acme", "--tier", "pro", "--name", "web shop")
    assert code == 0
    token = out.strip()
    assert token.startswith("mr-")
    assert "cannot be shown again" in err
    assert token not in err
    [shown] = keys.json("list")
    assert shown["tenant"] == "acme"
    assert shown["name"] == "web shop"
    assert token.split("-")[1] == shown["key_id"]
    assert token.split("-")[2] not in json.dumps(shown)
    assert "is revoked" in keys("revoke", shown["key_id"])
    assert keys.json("list", "--tenant", "acme")[0]["revoked"]
    assert keys.json("list", "--tenant", "nobody") == []


async def test_a_key_opens_a_gateway_until_it_is_revoked(
    redis_server: RedisServer, keys: Keys
) -> None:
    made = await asyncio.to_thread(
        keys.json, "create", "--tenant", "acme", "--tier", "pro", "--admin", "--context-tokens", "9"
    )
    caller = await caller_of(redis_server.url, made["key"])
    assert caller == Caller(
        tenant="acme", tier=Tier.PRO, key_id=made["key_id"], context_tokens=9, is_admin=True
    )
    await asyncio.to_thread(keys, "revoke", made["key_id"])
    with pytest.raises(AuthenticationError, match="revoked"):
        await caller_of(redis_server.url, made["key"])


def test_a_keys_tier_is_within_its_tenants(keys: Keys) -> None:
    assert keys.json("create", "--tenant", "acme", "--tier", "pro")["tier"] is None
    assert keys.json("tenant", "acme")["tier"] == "pro"
    assert keys.json("create", "--tenant", "acme", "--tier", "batch")["tier"] == "batch"
    code, out, err = keys.run("create", "--tenant", "acme", "--tier", "enterprise")
    assert (code, out) == (2, "")
    assert "millrace keys tenant acme --tier enterprise" in err
    keys("tenant", "acme", "--tier", "enterprise")
    assert keys.json("create", "--tenant", "acme", "--tier", "pro")["tier"] == "pro"
    assert len(keys.json("list")) == 3


def test_limits_of_a_tenant(keys: Keys) -> None:
    assert keys.json("tenant", "acme")["tier"] == "free"
    set_now = keys.json(
        *("tenant", "acme", "--tier", "pro", "--monthly-budget", "100.50"),
        *("--requests-per-minute", "6", "--concurrent-requests", "none"),
        *("--max-waiting-jobs", "20000"),
    )
    assert set_now["limits"] == msgspec.to_builtins(TierLimits().pro) | {
        "requests_per_minute": 6,
        "concurrent_requests": None,
        "monthly_budget": "100.50",
        "max_waiting_jobs": 20_000,
    }
    assert set_now["limits"]["tokens_per_minute"] == 2_000_000
    assert set(set_now["set_here"]) == {
        "max_waiting_jobs",
        "requests_per_minute",
        "concurrent_requests",
        "monthly_budget",
    }
    back = keys.json(
        *("tenant", "acme", "--requests-per-minute", "default", "--max-waiting-jobs", "default")
    )
    assert back["limits"]["max_waiting_jobs"] == 1_000
    code, _, err = keys.run("tenant", "acme", "--max-waiting-jobs", "0")
    assert code == 2
    assert "max_waiting_jobs must be between 1 and" in err
    assert back["limits"]["requests_per_minute"] == 600
    assert back["limits"]["monthly_budget"] == "100.50"
    text = keys("tenant", "acme", "--show")
    assert "Tenant acme, tier pro" in text
    assert re.search(r"monthly_budget +100.50 USD +100.50 USD left", text)
    assert "spent this month: 0 USD; held: 0 USD" in text
    usage = keys.json("tenant", "acme", "--show")["usage"]
    assert usage["remaining"]["requests_per_minute"] == 600


def test_a_budget_for_each_currency(keys: Keys) -> None:
    set_now = keys.json("tenant", "acme", "--monthly-budget", "100, 50.5 EUR")
    assert set_now["limits"]["monthly_budget"] == {"USD": "100", "EUR": "50.5"}
    shown = keys("tenant", "acme", "--show")
    assert re.search(r"monthly_budget +100 USD, 50.5 EUR +100 USD, 50.5 EUR left", shown)
    keys("create", "--tenant", "acme", "--monthly-budget", "20 EUR")
    [record] = keys.json("list")
    assert record["limits"] == {"monthly_budget": {"EUR": "20"}}
    assert record["effective_limits"]["monthly_budget"] == {"EUR": "20", "USD": "100"}
    assert keys("list").splitlines()[2].endswith("20 EUR a month, 100 USD a month")
    keys("tenant", "acme", "--monthly-budget", "none")
    assert keys.json("tenant", "acme")["limits"]["monthly_budget"] is None


def test_the_table(keys: Keys) -> None:
    head, _ = keys("list").splitlines()
    assert re.split(" {2,}", head) == [
        *("key_id", "tenant", "name", "tier", "admin", "transcripts"),
        *("created", "last used", "revoked", "limits"),
    ]
    keys("create", "--tenant", "acme", "--requests-per-minute", "5", "--monthly-budget", "none")
    _, _, row = keys("list").splitlines()
    assert " free " in row
    assert row.endswith("5 requests/min, 200000 tokens/min, 8 at once, 32768 context")
    [record] = keys.json("list")
    assert record["limits"] == {"requests_per_minute": 5, "monthly_budget": None}
    assert (record["tier"], record["effective_tier"]) == (None, "free")
    assert record["effective_limits"]["concurrent_requests"] == 8


async def test_the_last_use_of_a_key(redis_server: RedisServer, keys: Keys) -> None:
    made = await asyncio.to_thread(keys.json, "create", "--tenant", "acme", "--tier", "pro")
    assert (await asyncio.to_thread(keys.json, "list"))[0]["last_used"] is None
    clock = ManualClock()
    link = RedisLink(RedisConfig(url=redis_server.url))
    identity = Identity(link, GatewayConfig(host="0.0.0.0"), clock)

    async def told_after(seconds: float) -> str:
        await clock.advance(seconds)
        await identity.caller_of_token(made["key"])
        await identity.close()
        listed = await asyncio.to_thread(keys.json, "list")
        return str(listed[0]["last_used"])

    first = await told_after(0.0)
    assert await told_after(30.0) == first  # not for each request
    last = await told_after(31.0)
    assert last > first
    revoked = await asyncio.to_thread(keys.json, "revoke", made["key_id"])
    assert revoked["last_used"] == last
    await link.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tier", "pro"),
        ("--tier", "enterprise", "--requests-per-minute", "7"),
        ("--tier", "batch", "--admin"),
        (),
    ],
)
def test_what_is_told_of_a_new_key_is_what_holds(arguments: tuple[str, ...], keys: Keys) -> None:
    """A new tenant, a known tenant, and a revoked key."""
    for _ in range(2):
        made = keys.json("create", "--tenant", "acme", *arguments)
        del made["key"]
        listed = {one["key_id"]: one for one in keys.json("list")}
        assert made == listed[made["key_id"]]
        assert made["effective_tier"] == (arguments[1] if arguments else "free")
    revoked = keys.json("revoke", made["key_id"])
    assert revoked == {**made, "revoked": revoked["revoked"]}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("create", "--tenant", "a b"), "a tenant's name is"),
        (("tenant", ""), "a tenant's name is"),
        (("create", "--tenant", "a", "--name", "x" * 200), "printable"),
        (("create", "--tenant", "a", "--requests-per-minute", "0"), "between 1 and"),
        (("tenant", "a", "--monthly-budget", "-1"), "between 0 and"),
        (("tenant", "a", "--monthly-budget", "NaN"), "between 0 and"),
        (("tenant", "a", "--monthly-budget", "5 euro"), "three capital letters"),
        (("revoke", "000000000000"), "there is no key"),
    ],
)
def test_bad_input(keys: Keys, arguments: tuple[str, ...], complaint: str) -> None:
    code, out, err = keys.run(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err
    assert keys.json("list") == []


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--requests-per-minute", "many"),
        ("--monthly-budget", "EUR 5"),
        ("--monthly-budget", "5 EUR, 6 EUR"),
        ("--monthly-budget", "1,5"),
    ],
)
def test_a_limit_that_is_no_number(keys: Keys, option: str, text: str) -> None:
    with pytest.raises(SystemExit):
        keys.run("tenant", "a", option, text)


def test_where_redis_is(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys("create", "--tenant", "acme")
    file = tmp_path / "millrace.toml"
    file.write_text(f'[redis]\nurl = "{keys.url}"\n')
    assert main(["keys", "list", "--config", str(file)]) == 0
    assert "acme" in capsys.readouterr().out
    assert main(["keys", "list", "--data", str(tmp_path)]) == 2
    assert "Nothing runs on" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    running = dict.fromkeys(("http", "nats", "kafka", "clickhouse"), "nowhere")
    (tmp_path / "run" / "endpoints.json").write_text(json.dumps({**running, "redis": keys.url}))
    assert main(["keys", "list", "--data", str(tmp_path)]) == 0
    assert "acme" in capsys.readouterr().out
    (tmp_path / "run" / "endpoints.json").unlink()
    monkeypatch.setenv("MILLRACE_REDIS__URL", keys.url)
    assert main(["keys", "list", "--data", str(tmp_path)]) == 0
    assert "acme" in capsys.readouterr().out
    away = f"redis://:secret@127.0.0.1:{free_port()}"
    assert main(["keys", "list", "--redis", away]) == 2
    err = capsys.readouterr().err
    assert "no Redis answers at 127.0.0.1" in err
    assert "secret" not in err
    assert main(["keys", "list", "--redis", "http://127.0.0.1"]) == 2
    assert "redis.url cannot be used" in capsys.readouterr().err


def test_limits_are_those_of_this_instance(
    keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Limits come from the running system or from the named file, never silently from defaults."""
    keys("tenant", "acme", "--tier", "pro")
    (tmp_path / "run").mkdir()
    running = dict.fromkeys(("http", "nats", "kafka", "clickhouse"), "nowhere")
    (tmp_path / "run" / "endpoints.json").write_text(json.dumps({**running, "redis": keys.url}))
    pro = {"requests_per_minute": 7, "context_tokens": 999}
    tree = {"gateway": {"tiers": {"pro": pro}}, "redis": {"url": keys.url}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(tree))

    def shown(*where: str) -> Any:
        command = ["keys", "tenant", "acme", "--show", "--data", str(tmp_path), "--json", *where]
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)

    found = shown()
    assert found["limits"]["requests_per_minute"] == 7
    assert found["limits"]["context_tokens"] == 999
    assert found["usage"]["remaining"]["requests_per_minute"] == 7
    assert str(tmp_path) in found["tiers_from"]
    # The same Redis by another way is the same instance.
    assert shown("--redis", keys.url)["limits"]["requests_per_minute"] == 7
    file = tmp_path / "other.yaml"
    tree["gateway"] = {"tiers": {"pro": {**pro, "requests_per_minute": 8}}}
    file.write_text(json.dumps(tree))
    assert shown("--config", str(file))["limits"]["requests_per_minute"] == 8
    # Nothing says what another Redis' instance was told, and that is said.
    other = keys.url.removesuffix("/0") + "/1"
    assert "built-in" in shown("--redis", other)["tiers_from"]
    monkeypatch.setenv("MILLRACE_GATEWAY__TIERS__PRO__REQUESTS_PER_MINUTE", "9")
    assert shown()["limits"]["requests_per_minute"] == 9


async def keeps_transcripts(url: str, tenant: str) -> bool:
    link = RedisLink(RedisConfig(url=url))
    try:
        return await Identity(link, GatewayConfig(), SystemClock()).keeps_transcripts(tenant)
    finally:
        await link.close()


async def test_transcripts_are_kept_for_tenants_that_ask_for_it(
    redis_server: RedisServer, keys: Keys
) -> None:
    def commands(*arguments: str) -> Any:
        return keys.json(*arguments)

    made = await asyncio.to_thread(commands, "create", "--tenant", "acme", "--tier", "pro")
    assert made["keep_transcripts"] is False
    assert not await keeps_transcripts(redis_server.url, "acme")
    changed = await asyncio.to_thread(commands, "tenant", "acme", "--keep-transcripts", "on")
    assert (changed["keep_transcripts"], changed["tier"]) == (True, "pro")
    assert await keeps_transcripts(redis_server.url, "acme")
    assert not await keeps_transcripts(redis_server.url, "globex")
    # Another change leaves it as it is.
    kept = await asyncio.to_thread(commands, "tenant", "acme", "--requests-per-minute", "9")
    assert kept["keep_transcripts"] is True
    [listed] = await asyncio.to_thread(commands, "list")
    assert listed["keep_transcripts"] is True
    text = await asyncio.to_thread(keys, "tenant", "acme")
    assert [line.split() for line in text.splitlines() if "keep" in line] == [
        ["keep_transcripts", "yes"]
    ]
    await asyncio.to_thread(commands, "tenant", "acme", "--keep-transcripts", "off")
    assert not await keeps_transcripts(redis_server.url, "acme")
