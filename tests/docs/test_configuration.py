"""``docs/configuration.md`` is generated from the settings, and complete."""

from __future__ import annotations

import re

import pytest

from millrace.runtime import settings_reference
from millrace.runtime.settings import load_config
from millrace.schemas.errors import ConfigError
from tests.support.repository import ROOT

CHECKED_IN = ROOT / "docs" / "configuration.md"


def rows() -> list[tuple[str, str, str]]:
    """Return key, variable and type of each setting."""
    page = CHECKED_IN.read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)`<br>`([^`]+)` \| (.+?) \| .* \| .+ \|$", page, re.MULTILINE)


def test_page_is_as_generated_from_the_settings() -> None:
    stale = "run: python -m millrace.runtime.settings_reference > docs/configuration.md"
    assert CHECKED_IN.read_text(encoding="utf-8") == settings_reference.text(), stale


def test_every_variable_sets_something() -> None:
    assert len(rows()) > 150
    for key, generic, _ in rows():
        variable = generic.replace("__TIER__", "__FREE__")
        try:
            load_config(None, {variable: "1"})
        except ConfigError as error:
            refused = str(error)
        else:
            refused = ""
        # A value may be refused, a setting that does not exist may not.
        assert not re.search("has no setting|is a section|has nothing below", refused), key


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("nats.ack_wait_s", "number (seconds)"),
        ("worker.flush_interval_ms", "number (milliseconds)"),
        ("gateway.max_file_bytes", "whole number (bytes)"),
        ("gateway.tiers.TIER.context_tokens", "whole number or none (tokens)"),
        ("redis.password", "secret text"),
        ("scheduler.order", "`deadline` or `shortest`"),
    ],
)
def test_a_type_says_its_unit(key: str, kind: str) -> None:
    assert kind in [shown for name, _, shown in rows() if name == key]
