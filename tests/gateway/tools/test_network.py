"""Network addresses that the gateway's tools may reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.gateway.tools.catalogue import load_tools
from millrace.gateway.tools.network import is_allowed
from millrace.gateway.tools.runner import MAX_REDIRECTS, ToolRunner
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError
from tests.gateway.tools.runners import ARGUMENTS, SECRET, outcome, runner
from tests.support.tool_server import ToolServer, reply, tool_server


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433", "0.0.0.0"],
)
async def test_names_of_this_machine(tmp_path: Path, server: ToolServer, host: str) -> None:
    tool = {"url": server.url("/w", host), "allow_private": False}
    result = await outcome(tmp_path, tool)
    assert not result.ok
    assert result.output in {
        "The tool leads to an address that is not allowed.",
        "The tool cannot be reached.",
    }
    assert server.num_connections == 0


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("8.8.8.8", True, True),
        ("2606:4700::1111", True, True),
        ("64:ff9b::808:808", True, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("10.1.2.3", False, True),
        ("172.16.0.1", False, True),
        ("192.168.0.1", False, True),
        ("fd12::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("::10.0.0.1", False, True),
        ("64:ff9b::7f00:1", False, True),
        ("2002:7f00:1::", False, True),
        ("2001:0:808:808:0:0:80ff:fffe", False, True),
        ("100.64.0.1", False, False),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("fd00:ec2::254", False, False),
        ("100.100.100.200", False, False),
        ("fe80::1", False, False),
        ("fe80::1%1", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("ff02::1", False, False),
        ("240.0.0.1", False, True),
    ],
)
def test_addresses(address: str, public: bool, private: bool) -> None:
    assert is_allowed(address, allow_private=False) is public
    assert is_allowed(address, allow_private=True) is private


class Names:
    """Resolves names as a test says; each answer is given once, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def test_a_name_is_asked_for_once_and_what_it_gave_is_reached(
    tmp_path: Path, server: ToolServer
) -> None:
    names = Names(["127.0.0.1"], ["169.254.169.254"])
    server.answers["/w"] = reply("fine", connection="close")
    tool = {"url": server.url("/w", "tool.test")}
    async with runner(tmp_path, tool, names) as running:
        assert (await running.run("weather", ARGUMENTS)).output == "fine"
        assert names.asked == ["tool.test"]
        assert server.seen[0].headers["host"] == f"tool.test:{server.port}"
        # The next connection is another one, and is checked again.
        result = await running.run("weather", ARGUMENTS)
        assert result.output == "The tool leads to an address that is not allowed."
    assert len(server.seen) == 1


async def test_one_forbidden_address_of_a_name_is_enough(
    tmp_path: Path, server: ToolServer
) -> None:
    names = Names(["93.184.216.34", "127.0.0.1"])
    tool = {"url": server.url("/w", "tool.test"), "allow_private": False}
    result = await outcome(tmp_path, tool, resolver=names)
    assert result.output == "The tool leads to an address that is not allowed."
    assert server.num_connections == 0


async def test_an_address_that_does_not_answer_is_passed_over(
    tmp_path: Path, server: ToolServer
) -> None:
    server.answers["/w"] = reply("fine")
    names = Names(["127.0.0.2", "127.0.0.1"])
    assert (await outcome(tmp_path, {"url": server.url("/w", "t.test")}, resolver=names)).ok


async def test_a_name_without_addresses(tmp_path: Path, server: ToolServer) -> None:
    result = await outcome(tmp_path, {"url": server.url("/w", "t.test")}, resolver=Names([]))
    assert result.output == "The tool cannot be reached."


@pytest.mark.parametrize(
    ("status", "method", "has_body"),
    [
        (301, "GET", False),
        (302, "GET", False),
        (303, "GET", False),
        (307, "POST", True),
        (308, "POST", True),
    ],
)
async def test_redirects_within_an_origin(
    tmp_path: Path, server: ToolServer, status: int, method: str, has_body: bool
) -> None:
    server.answers["/w"] = reply("", status, location="new?x=1")
    server.answers["/new"] = reply("moved")
    tool = {"url": server.url("/w"), "secret_header": {"name": "X-Key", "env": "KEY"}}
    assert (await outcome(tmp_path, tool, env={"KEY": SECRET})).output == "moved"
    last = server.seen[-1]
    assert (last.method, last.target, bool(last.body)) == (method, "/new?x=1", has_body)
    assert last.headers["x-key"] == SECRET


async def test_redirects_come_to_an_end(tmp_path: Path, server: ToolServer) -> None:
    server.answers["/w"] = reply("", 302, location="/w")
    result = await outcome(tmp_path, {"url": server.url("/w")})
    assert result.output == f"The tool redirects more than {MAX_REDIRECTS} times."
    assert len(server.seen) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:{other}/",
        "http://127.0.0.1:{other}/",
        "http://[::1]:{other}/",
        "//2130706433:{other}/",
    ],
)
async def test_redirects_to_private_networks(
    tmp_path: Path, server: ToolServer, location: str
) -> None:
    async with tool_server() as other:
        server.answers["/w"] = reply("", 307, location=location.format(other=other.port))
        result = await outcome(tmp_path, {"url": server.url("/w")})
        assert result.output == "The tool leads to an address that is not allowed."
        assert other.num_connections == 0


@pytest.mark.parametrize(
    "location",
    ["ftp://x/", "file:///etc/passwd", "http://a:b@x/", "http://x:y/", "http://é/"],
)
async def test_redirects_to_no_address(tmp_path: Path, server: ToolServer, location: str) -> None:
    server.answers["/w"] = reply("", 307, location=location)
    result = await outcome(tmp_path, {"url": server.url("/w")})
    assert result.output == "The tool redirects to an invalid web address."


async def test_secrets_stay_at_their_origin(
    tmp_path: Path, server: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.gateway.tools.network.is_allowed", lambda *_, **__: True)
    async with tool_server() as other:
        server.answers["/w"] = reply("", 307, location=other.url("/w"))
        other.answers["/w"] = reply("fine")
        tool = {
            "url": server.url("/w"),
            "headers": {"X-Own": "1"},
            "secret_header": {"name": "X-Key", "env": "KEY"},
        }
        assert (await outcome(tmp_path, tool, env={"KEY": SECRET})).ok
        assert {"x-own", "x-key"} <= server.seen[0].headers.keys()
        assert not {"x-own", "x-key"} & other.seen[0].headers.keys()
        assert other.seen[0].body == server.seen[0].body


async def test_only_allowed_hosts(tmp_path: Path, server: ToolServer) -> None:
    hosts = ("*.tools.test", "api.test")
    names = Names(["127.0.0.1"])
    with pytest.raises(ConfigError, match=r"weather leads to tools\.test, which is not among"):
        await outcome(tmp_path, {"url": "http://tools.test/"}, tool_allowed_hosts=hosts)
    server.answers["/w"] = reply("fine")
    for host in ("api.test", "a.b.tools.test"):
        tool = {"url": server.url("/w", host)}
        assert (await outcome(tmp_path, tool, resolver=names, tool_allowed_hosts=hosts)).ok
    server.answers["/w"] = reply("", 307, location="http://example.com/")
    result = await outcome(tmp_path, tool, resolver=names, tool_allowed_hosts=hosts)
    assert result.output == "The tool leads to an address that is not allowed."
    assert "example.com" not in names.asked


def test_a_bound_that_lets_nothing_run() -> None:
    with pytest.raises(ConfigError, match="max_tool_runs"):
        ToolRunner(load_tools("", {}), GatewayConfig(max_tool_runs=0), SystemClock())
