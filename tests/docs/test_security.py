"""``docs/security.md``: a test holds every statement."""

from __future__ import annotations

import ast
import re
from functools import cache
from operator import attrgetter

import pytest

from millrace.bus.nats.topology import streams
from millrace.schemas.config import Config, NatsConfig
from tests.docs.security_page import TEXT, kept_s, references, statements
from tests.support.repository import ROOT

_SERVER_VERSION = (2, 15)


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("statement", statements())
def test_each_statement_names_a_test_that_is_there(statement: str) -> None:
    named = references(statement)
    assert named, "no test is named"
    for path, name in named:
        assert name in _tests_of(path), f"{path} has no {name}"


def test_page_has_only_lists_and_tables() -> None:
    """Headings and the paragraph under the title are the only exceptions."""
    body = TEXT.split("\n## ", 1)[1]
    for block in re.split(r"\n\s*\n", f"## {body}"):
        for part in re.split(r"^(?=- |#|\|)", block.strip(), flags=re.MULTILINE):
            assert not part or part[0] in "-#|", part


def test_settings_and_streams_keep_things_as_long_as_it_is_said() -> None:
    bounds_ns = {body["name"]: body["max_age"] for body in streams(NatsConfig(), _SERVER_VERSION)}
    for (kind, name), said_s in kept_s().items():
        if kind == "setting":
            assert attrgetter(name)(Config()) == said_s, name
        elif kind == "stream":
            assert bounds_ns[name] == said_s * 1e9, name


def test_each_stream_that_forgets_is_told() -> None:
    settings = {
        "RESULTS": "nats.results_ttl_s",
        "OUTBOX": "nats.outbox_max_age_s",
        "FILES": "nats.files_ttl_s",
        "BATCHES": "nats.files_ttl_s",
    }
    told = {name for _kind, name in kept_s()}
    for body in streams(NatsConfig(), _SERVER_VERSION):
        if body["max_age"]:
            assert settings.get(body["name"], body["name"]) in told
