"""Output of ``--help`` and ``--version`` of every command."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

import pytest

from millrace.cli.help import EXAMPLES
from millrace.cli.main import _COMMANDS, build_parser, main, version
from tests.support.repository import ROOT


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Return a parser and the parsers of all commands below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


PARSERS = {parser.prog: parser for parser in _commands(build_parser())}


def _help_of(command: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "millrace.cli", *command.split()[1:], "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    ).stdout


def test_the_examples_are_of_all_commands_and_no_other() -> None:
    assert set(EXAMPLES) == set(PARSERS)


def test_every_example_parses() -> None:
    for command, examples in EXAMPLES.items():
        for example in examples:
            assert example.startswith(command)
            if "COMMAND" not in example:
                parsed = build_parser().parse_args(shlex.split(example)[1:])
                assert callable(parsed.handler), example


@pytest.mark.parametrize("command", PARSERS)
def test_every_command_is_explained_in_the_width_that_there_is(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    shown = PARSERS[command].format_help()
    assert "\x1b" not in shown
    text, examples = shown.split("\nExamples:\n")
    # A line is longer only if one of its words is, such as an option with all its choices.
    long = [line for line in text.splitlines() if len(line) > 64 and len(line.split()) > 4]
    assert not long
    assert [line.strip() for line in examples.splitlines()] == list(EXAMPLES[command])


def test_the_commands_stand_in_groups_with_a_line_each() -> None:
    shown = _help_of("millrace")
    for heading, commands in _COMMANDS.items():
        at = shown.index(f"\n{heading.capitalize()}:\n")
        for name in commands:
            line = next(line for line in shown[at:].splitlines() if line.startswith(f"  {name} "))
            assert len(line.split(maxsplit=1)[1]) > 10
    assert "{up," not in shown


def test_colours_are_for_terminals() -> None:
    assert "\x1b" not in _help_of("millrace up")
    assert "\x1b[" in _help_of("millrace up", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[36m" not in _help_of(
        "millrace up", FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color"
    )


def test_a_usage_error_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--prt", "1"])
    assert capsys.readouterr().err.startswith("usage: millrace")


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"millrace {metadata.version('millrace')}\n"

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert version() == project["version"]
