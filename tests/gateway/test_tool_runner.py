"""Tools that the gateway runs: what they get and give, their bounds, and where they may lead."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from bus.clock import SystemClock
from gateway.tool_catalogue import load_tools
from gateway.tool_network import Resolve, is_allowed, resolve
from gateway.tool_runner import MAX_REDIRECTS, ToolResult, ToolRunner
from schemas.config import GatewayConfig
from schemas.errors import ConfigError, ParameterError
from tests.support.tool_server import Answer, Seen, ToolServer, Write, reply, tool_server
from tests.support.waiting import eventually

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "Łódź", "days": 2}'
SECRET = "s3cr3t-value"


@pytest.fixture
async def server() -> AsyncIterator[ToolServer]:
    async with tool_server() as running:
        yield running


@asynccontextmanager
async def runner(
    folder: Path,
    tool: Mapping[str, Any],
    resolver: Resolve = resolve,
    env: Mapping[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[ToolRunner]:
    """A runner of one tool, ``weather``."""
    file = folder / "tools.yaml"
    entry = {"parameters": WEATHER, "allow_private": True} | dict(tool)
    file.write_text(yaml.safe_dump({"tools": {"weather": entry}}))
    tools = load_tools(str(file), env or {})
    running = ToolRunner(tools, GatewayConfig(**config), SystemClock(), resolver)
    try:
        yield running
    finally:
        await running.close()


async def outcome(
    folder: Path, tool: Mapping[str, Any], arguments: str = ARGUMENTS, **settings: Any
) -> ToolResult:
    async with runner(folder, tool, **settings) as running:
        return await running.run("weather", arguments)


async def test_a_tool_gets_its_arguments_as_json(tmp_path: Path, server: ToolServer) -> None:
    server.answers["/w"] = reply('{"sky": "ciężkie"}')
    tool = {
        "url": server.url("/w"),
        "headers": {"X-Units": "metric", "Accept": "application/json"},
        "secret_header": {"name": "Authorization", "env": "WEATHER_KEY"},
    }
    result = await outcome(tmp_path, tool, env={"WEATHER_KEY": f"Bearer {SECRET}"})
    assert (result.ok, result.output) == (True, '{"sky": "ciężkie"}')
    assert result.duration_ms > 0
    (seen,) = server.seen
    assert (seen.method, seen.target) == ("POST", "/w")
    assert json.loads(seen.body) == {"city": "Łódź", "days": 2}
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["authorization"] == f"Bearer {SECRET}"
    assert (seen.headers["x-units"], seen.headers["accept"]) == ("metric", "application/json")
    assert seen.headers["host"] == f"127.0.0.1:{server.port}"


async def test_a_get_has_them_in_the_query(tmp_path: Path, server: ToolServer) -> None:
    server.answers["/w"] = reply("fine")
    tool = {"url": server.url("/w?lang=pl"), "method": "GET"}
    assert (await outcome(tmp_path, tool)).output == "fine"
    assert server.seen[0].target == "/w?lang=pl&city=%C5%81%C3%B3d%C5%BA&days=2"
    assert server.seen[0].body == b""


async def test_connections_are_kept(tmp_path: Path, server: ToolServer) -> None:
    server.answers["/w"] = reply("fine")
    async with runner(tmp_path, {"url": server.url("/w")}) as running:
        for _ in range(3):
            assert (await running.run("weather", ARGUMENTS)).ok
    assert (len(server.seen), server.num_connections) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{", "not valid JSON"),
        ('{"city": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must be a JSON object"),
        ("", "'city' is a required property"),
        ('{"city": 7}', r"\$\.city: 7 is not of type 'string'"),
        ('{"city": "x", "days": 0}', r"\$\.days: 0 is less than the minimum of 1"),
        ('{"city": "x", "where": 0}', "'where' was unexpected"),
    ],
)
async def test_bad_arguments_never_reach_the_tool(
    tmp_path: Path, server: ToolServer, arguments: str, words: str
) -> None:
    result = await outcome(tmp_path, {"url": server.url("/w")}, arguments)
    assert not result.ok
    assert re.search(words, result.output)
    assert server.seen == []


async def test_a_tool_that_there_is_not(tmp_path: Path, server: ToolServer) -> None:
    async with runner(tmp_path, {"url": server.url("/w")}) as running:
        result = await running.run("f", "{}")
        assert (result.ok, result.output) == (False, "There is no tool 'f'.")
        with pytest.raises(
            ParameterError, match=r"no server tool .f.\. There are: weather"
        ) as caught:
            running.definitions(["weather", "f"])
        assert caught.value.param == "server_tools"
        (told,) = running.definitions(["weather", "weather"])
        assert (told.name, told.parameters) == ("weather", WEATHER)


@pytest.mark.parametrize(
    ("answer", "ok", "words"),
    [
        (reply(""), True, ""),
        (
            reply("caf\xe9".encode("latin-1"), content_type="text/plain; charset=Latin-1"),
            True,
            "café",
        ),
        (reply(b"\xff\xfe"), False, "The tool's answer is not text."),
        (reply("x", content_type="text/plain; charset=klingon"), False, "is not text"),
        (reply("no such city", 404), False, "HTTP status 404: no such city"),
        (reply("Traceback: password", 500), False, "The tool answered with HTTP status 500."),
        (reply("x" * 101), False, "larger than 100 bytes"),
        (reply("x" * 100), True, "x" * 100),
        (reply("hop", 304), False, "HTTP status 304"),
    ],
)
async def test_what_a_tool_answers(
    tmp_path: Path, server: ToolServer, answer: Answer, ok: bool, words: str
) -> None:
    server.answers["/w"] = answer
    result = await outcome(tmp_path, {"url": server.url("/w"), "max_response_bytes": 100})
    assert result.ok is ok
    assert result.output == words if ok else words in result.output


async def endless(_seen: Seen, write: Write) -> None:
    await write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await write(b"400\r\n" + b"x" * 1_024 + b"\r\n")


async def dripping(_seen: Seen, write: Write) -> None:
    await write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        await write(b"1\r\nx\r\n")
        await asyncio.sleep(0.01)


async def silent(_seen: Seen, _write: Write) -> None:
    await asyncio.Event().wait()


async def rude(_seen: Seen, _write: Write) -> None:
    raise ConnectionResetError


async def garbled(_seen: Seen, write: Write) -> None:
    await write(b"SMTP ready\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "larger than 65536 bytes"),
        (dripping, "did not answer within 0.3 s"),
        (silent, "did not answer within 0.3 s"),
        (rude, "cannot be reached"),
        (garbled, "cannot be reached"),
    ],
)
async def test_a_tool_that_misbehaves(
    tmp_path: Path, server: ToolServer, answer: Answer, words: str
) -> None:
    server.answers["/w"] = answer
    async with runner(tmp_path, {"url": server.url("/w"), "timeout_s": 0.3}) as running:
        result = await running.run("weather", ARGUMENTS)
        assert not result.ok
        assert words in result.output
        server.answers["/w"] = reply("better now")
        assert (await running.run("weather", ARGUMENTS)).output == "better now"


async def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    async with tool_server() as server:
        url = server.url("/w")
    result = await outcome(tmp_path, {"url": url})
    assert (result.ok, result.output) == (False, "The tool cannot be reached.")


async def test_so_many_run_at_a_time(tmp_path: Path, server: ToolServer) -> None:
    go_on = asyncio.Event()

    async def when_told(seen: Seen, write: Write) -> None:
        await go_on.wait()
        await reply("done")(seen, write)

    server.answers["/w"] = when_told
    async with runner(tmp_path, {"url": server.url("/w")}, max_tool_runs=2) as running:
        given_up, *others = [
            asyncio.create_task(running.run("weather", ARGUMENTS)) for _ in range(4)
        ]
        await eventually(lambda: len(server.seen) == 2)
        given_up.cancel()
        await eventually(lambda: len(server.seen) == 3)
        go_on.set()
        assert all(result.ok for result in await asyncio.gather(*others))
    assert len(server.seen) == 4


async def test_secrets_are_in_no_text(
    tmp_path: Path, server: ToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def mirror(seen: Seen, write: Write) -> None:
        status = 200 if len(server.seen) == 1 else 400
        key = seen.headers["x-key"]
        await reply(f"you sent {key}, {key.removeprefix('Bearer ')}", status)(seen, write)

    caplog.set_level(logging.DEBUG)
    server.answers["/w"] = mirror
    tool = {"url": server.url("/w"), "secret_header": {"name": "X-Key", "env": "KEY"}}
    async with runner(tmp_path, tool, env={"KEY": f"Bearer {SECRET}"}) as running:
        outputs = [(await running.run("weather", ARGUMENTS)).output for _ in range(2)]
        told = repr(running.catalogue.get("weather"))
    assert outputs == [
        "you sent [secret], [secret]",
        "The tool answered with HTTP status 400: you sent [secret], [secret]",
    ]
    assert SECRET not in told
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("gateway")]
    assert not any(SECRET in text or "Łódź" in text for text in ours)


# --- where tools may lead ---


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
    assert result.output == "The tool redirects to what is no web address."


async def test_secrets_stay_at_their_origin(
    tmp_path: Path, server: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tool_network.is_allowed", lambda *_, **__: True)
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
