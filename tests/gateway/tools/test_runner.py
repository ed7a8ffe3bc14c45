"""Tools that the gateway runs: arguments, results and limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest

from millrace.schemas.errors import ParameterError
from tests.gateway.tools.runners import ARGUMENTS, SECRET, WEATHER, outcome, runner
from tests.support.tool_server import Answer, Seen, ToolServer, Write, reply, tool_server
from tests.support.waiting import eventually


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
            running.catalogue.definitions(["weather", "f"])
        assert caught.value.param == "server_tools"
        (definition,) = running.catalogue.definitions(["weather", "weather"])
        assert (definition.name, definition.parameters) == ("weather", WEATHER)


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
    ours = [log.getMessage() for log in caplog.records if log.name.startswith("millrace.gateway")]
    assert not any(SECRET in text or "Łódź" in text for text in ours)
