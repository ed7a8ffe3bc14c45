"""Links, commands, code and figures of the documents are valid."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from millrace.cli.main import build_parser
from millrace.schemas.config import EngineConfig
from tests.docs.screenshots import MAX_BYTES
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_options_of_the_benchmarks_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^python -m benchmarks\.peers (.+)$", text, re.MULTILINE)
    assert len(lines) == 2
    code = ast.parse((ROOT / "benchmarks" / "peers" / "__main__.py").read_text())
    [run] = [one for one in code.body if isinstance(one, ast.FunctionDef) and one.name == "run"]
    parameters = {one.arg for one in (*run.args.args, *run.args.kwonlyargs)}
    for line in lines:
        for option in re.findall(r"--([a-z-]+)", line):
            assert option.replace("-", "_") in parameters


def test_commands_of_the_readme_parse() -> None:
    lines = re.findall(r"^(millrace .+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line, comments=True)
        assert build_parser().parse_args(words[1:]).handler is not None


@pytest.mark.parametrize("name", ["README.md", "docs/first-request.md"])
def test_python_for_newcomers_compiles(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, name, "exec")


def test_the_table_of_endpoints_matches_the_openapi_document() -> None:
    page = (ROOT / "docs" / "endpoints.md").read_text()
    section = page.split("## What is served")[1].split("\n## ")[0]
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
    section = (ROOT / "docs" / "gpu.md").read_text()
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    names = re.findall(r"`(\w+)(?:: \w+)?`", "".join(cells))
    assert len(names) >= 6
    assert set(names) <= set(EngineConfig.__struct_fields__)
    assert str(EngineConfig().gpu_memory_fraction) in section


def test_pictures_are_small_and_shown() -> None:
    shown = set(re.findall(r"!\[.+?\]\((docs/images/[\w.-]+)\)", (ROOT / "README.md").read_text()))
    pictures = list((ROOT / "docs" / "images").glob("*.png"))
    assert {str(picture.relative_to(ROOT)) for picture in pictures} == shown
    assert all(picture.stat().st_size <= MAX_BYTES for picture in pictures)
