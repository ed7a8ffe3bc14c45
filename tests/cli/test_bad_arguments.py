"""No argument of a command prints a traceback: each ends in a sentence and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.cli.arguments import as_path, path_or_name
from millrace.cli.main import build_parser, main
from millrace.schemas.config import NatsConfig

_LONG = "x" * 300
_BAD = (_LONG, "x" * 5_000, "9" * 25, 'a"b', "²", "0001-01-01", "[", "http://[")
# These start processes, load models or wait for hosts: below are their cases.
_LEFT_OUT = {"up", "stages", "generate", "embed", "quantize", "bench", "simulate"}
# A name in an address is looked up, which may take long.
_ADDRESSES = {"nats", "redis"}
# What the other arguments are.
_GOOD = {"version": "demo@v2", "begin": "2026-01-01", "query": "SELECT 1"}


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _commands(below, (*path, name))
            return
    yield path, parser


def _good(action: argparse.Action) -> str:
    return str(next(iter(action.choices or (_GOOD.get(action.dest, "demo"),))))


def _given(parser: argparse.ArgumentParser, bad: argparse.Action, value: str) -> list[str]:
    """Return a command line with the value for one argument and the command's required ones."""
    options, places = [], []
    excluded = {
        id(other)
        for group in parser._mutually_exclusive_groups
        if bad in group._group_actions
        for other in group._group_actions
        if other is not bad
    }
    for group in parser._mutually_exclusive_groups:
        if group.required and bad not in group._group_actions:
            first = next(one for one in group._group_actions if one.nargs != 0)
            if first.option_strings:
                options.append(f"{first.option_strings[-1]}={_good(first)}")
            else:
                places.append(_good(first))
    for action in parser._actions:
        text = value if action is bad else _good(action)
        if action.option_strings:
            if action is bad or (action.required and id(action) not in excluded):
                options.append(f"{action.option_strings[-1]}={text}")
        elif action is bad or action.nargs not in ("?", "*"):
            places.append(text)
    return [*options, "--", *places] if places else options


def _cases() -> list[tuple[str, ...]]:
    cases = []
    for path, parser in _commands(build_parser()):
        if path[0] in _LEFT_OUT:
            continue
        for action in parser._actions:
            is_text = action.nargs != 0 and not isinstance(action, argparse._HelpAction)
            if is_text and action.dest not in _ADDRESSES:
                cases += [(*path, *_given(parser, action, value)) for value in _BAD]
    return cases


def _ends_in_a_sentence(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's error, a sentence. Code 3 means ``status`` without a system."""
    code: int | str | None
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code in (0, 2, 3), arguments
    assert "Traceback" not in error
    assert code != 2 or error, arguments
    return error


def test_every_option_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = build_parser()
    # Made once: the commands do not change it.
    monkeypatch.setattr("millrace.cli.main.build_parser", lambda: parser)
    cases = _cases()
    assert len(cases) > 350
    for arguments in cases:
        _ends_in_a_sentence(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("publish", "--prompt", "x", "--model", _LONG), "model must have at most 256 characters"),
        (("publish", "--prompt", "x", "--tenant", _LONG), "tenant must have at most 128"),
        (
            ("publish", "--prompt", "x", "--model", "m" * 250, "--adapter", "a" * 100),
            "--model and --adapter together must have at most 256 characters",
        ),
        (("publish", "--prompt", "x", "--max-tokens", str(10**25)), "is above 2147483647"),
        (("publish", "--prompt", "x\udcff"), "is not UTF-8 text"),
        (("publish", "--prompt", "x", "--tenant", ""), "tenant must not be empty"),
        (("publish", "--prompt", "x", "--timeout", "-1"), "'-1' must be 0 seconds or more"),
        (("publish", "--prompt", "x", "--timeout", "nan"), "'nan' must be 0 seconds or more"),
        (("result", "x" * 5_000), "request_id must have at most 128 characters"),
        (("result", "x", "--tenant", "x" * 5_000), "tenant must have at most 128 characters"),
        (("result", ""), "request_id must not be empty"),
    ],
)
async def test_jobs_that_no_bus_takes(
    nats_config: NatsConfig,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    bus = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    await bus.close()
    with contextlib.suppress(SystemExit):
        assert main([*arguments, "--nats", nats_config.url]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("models", "add", "m", "--engine", "vllm", "--engine-arguments", 'a "b'),
            "--engine-arguments cannot be read: No closing quotation",
        ),
        (("up", "--engine", "vllm", "--engine-arguments", "a 'b"), "--engine-arguments cannot be"),
        (("status", "--data", _LONG), "File name too long"),
        (("workers", "drain", "w", "--timeout", "-1"), "'-1' must be 0 seconds or more"),
        (("top", "--interval", "nan"), "--interval must be at least 0.2 s"),
        (("top", "--once", "--nats", "nats://["), "nats.url must look like"),
        (("top", "--once", "--nats", "nats://h:99999"), "nats.url must look like"),
        (("top", "--once", "--nats", "nats://u:p#w@h"), "Percent-encode the user name"),
        (("keys", "list", "--redis", "redis://["), "redis.url cannot be used"),
        (("keys", "list", "--redis", "redis://:p/w@h"), "Percent-encode the user name"),
        (("logs", "--since", "0001-01-01"), "--since"),
        (("up", "--data", _LONG), "File name too long"),
        (("simulate", "synthesise", "--rate", "1", "--model", _LONG), "model must have at most"),
        (("simulate", "synthesise", "--rate", "1", "--tenants", _LONG), "tenant must have at most"),
        (
            ("simulate", "synthesise", "--rate", "1", "--duration", "9" * 25),
            "make more than 100,000,000 requests",
        ),
        (
            ("bench", "--url", "http://127.0.0.1:9", "--rate", "1", "--duration", "9" * 25),
            "make more than 100,000,000 requests",
        ),
        (("generate", "--input", "x", "--output", "y", "--threads", "9" * 25), "is above"),
    ],
)
def test_what_else_cannot_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in _ends_in_a_sentence(arguments, capsys)


def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    num_options = 0
    for path, parser in _commands(build_parser()):
        for action in parser._actions:
            shown = " ".join(action.metavar or ()) if action.nargs == 2 else str(action.metavar)
            words = ("PATH", "FILE", "DIR", "FOLDER", ".json")
            is_path = shown == "F" or any(word in shown for word in words)
            assert (action.type in (as_path, path_or_name)) == (
                is_path and action.dest != "adapter"
            ) or action.dest in ("config", "catalogue", "speculation"), (path, action)
            if action.type not in (as_path, path_or_name):
                continue
            line = _given(parser, action, "")
            if action.nargs == 2:
                line = [action.option_strings[-1], "", ""]
            error = _ends_in_a_sentence((*path, *line), capsys)
            assert "it is empty; leave the option out" in error, (path, action)
            num_options += 1
    assert num_options > 40
    assert not list(tmp_path.iterdir())
