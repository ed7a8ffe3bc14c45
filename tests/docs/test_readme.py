"""What the documents say can be typed, opened and run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from millrace.cli.main import build_parser
from millrace.schemas.config import EngineConfig
from tests.support.repository import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids)
def test_headings_that_are_linked_exist(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text()):
        page = (document.parent / target) if target else document
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids)
def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?\bmake ([a-z]+)\b(?=[`\s])", document.read_text()):
        if f"`make {target}" in document.read_text() or f"\nmake {target}" in document.read_text():
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids)
def test_modules_to_run_exist(document: Path) -> None:
    for module in re.findall(r"python -m ([a-z_.]+)", document.read_text()):
        assert importlib.util.find_spec(module) is not None, module


def test_commands_of_the_readme_parse() -> None:
    lines = re.findall(r"^(millrace .+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line, comments=True)
        assert build_parser().parse_args(words[1:]).handler is not None


def test_python_of_the_readme_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_the_endpoints_of_the_readme_are_those_that_are_served() -> None:
    section = (ROOT / "README.md").read_text().split("## What is served")[1].split("\n- **")[0]
    told = {
        endpoint.rstrip("/") for endpoint in re.findall(r"`(?:[A-Z]+ )?(/[a-z0-9_./]*)", section)
    }
    served = set(json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"])
    undocumented = {"", "/ops", "/v1/ws"}  # pages, and what is no HTTP
    assert undocumented < told
    for endpoint in told - undocumented:
        assert any(path == endpoint or path.startswith(f"{endpoint}/") for path in served), endpoint
    for path in served:
        assert any(
            path == endpoint or path.startswith(f"{endpoint}/") for endpoint in told - {""}
        ), path


def test_the_settings_of_an_engine_on_a_gpu_are_there() -> None:
    section = (ROOT / "README.md").read_text().split("## On a GPU")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    names = re.findall(r"`(\w+)(?:: \w+)?`", "".join(cells))
    assert len(names) >= 6
    assert set(names) <= set(EngineConfig.__struct_fields__)
    assert str(EngineConfig().gpu_memory_fraction) in section
