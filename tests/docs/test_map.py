"""Map of the code: named files exist, and a newcomer finds a file in two hops."""

from __future__ import annotations

import ast
import re
from operator import attrgetter
from pathlib import Path

import pytest

from millrace.schemas.config import Config
from tests.support.repository import PACKAGES, ROOT, python_files

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_TOP = "|".join((*PACKAGES, "tests", "benchmarks", "tools", "docs", "deploy"))
_PATH = re.compile(rf"`((?:{_TOP})/[\w./-]*)`")
_DOTTED = re.compile(rf"`((?:{'|'.join((*PACKAGES, *Config.__struct_fields__))})(?:\.\w+)+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for named in _PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_modules_that_are_named_exist(page: Path) -> None:
    for named in _DOTTED.findall(page.read_text(encoding="utf-8")):
        place = named.replace(".", "/")
        is_module = (ROOT / place).is_dir() or (ROOT / f"{place}.py").exists()
        try:
            attrgetter(named.replace(".TIER.", ".free."))(Config())
        except AttributeError:
            assert is_module, named


@pytest.mark.parametrize("page", [DOCS / "architecture.md", DOCS / "glossary.md"])
def test_classes_that_are_named_exist(page: Path) -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in python_files(*PACKAGES))
    classes = set(re.findall(r"^(?:class )?([A-Z]\w+)", code, re.MULTILINE))
    named = set(re.findall(r"`([A-Z][a-z]+[A-Za-z]*)`", page.read_text(encoding="utf-8")))
    assert named
    assert named <= classes


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} == linked


def test_every_package_is_on_the_map() -> None:
    for page in (DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        assert not [package for package in PACKAGES if f"`{package}/`" not in text], page.name


def test_each_word_has_one_meaning_and_its_place_in_the_code() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| .+ \| `([^`]+)`(?:, `(\w+)`)? \|$", text, re.MULTILINE)
    words = [word for row in rows for word in row[0].split(", ")]
    assert len(words) > 50
    assert len(words) == len(set(words))
    for word, file, name in rows:
        code = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:class |def |async def )?{name}\b", code, re.MULTILINE), (
            f"{word}: {name}"
        )


@pytest.mark.parametrize(
    ("step", "file", "symbol"),
    [
        ("Make the job", "gateway/request/job_maker.py", "JobMaker"),
        ("Pull and order", "scheduler/stages/pull.py", "JobPuller.accept"),
        ("Pull and order", "scheduler/stages/prepare.py", "start"),
        ("Pull and order", "scheduler/jobs/tenant_lines.py", "TenantLines.admit"),
        ("Pull and order", "scheduler/queues/fair_queue.py", "FairQueue.head"),
        ("Place", "scheduler/stages/place.py", "dispatch_ready"),
        ("Place", "scheduler/placement/placement.py", "choose"),
        ("Dispatch", "scheduler/stages/send.py", "send"),
        ("Dispatch", "workers/host/requests.py", "Requests.dispatch"),
        ("Dispatch", "workers/host/generations/generation.py", "Generation"),
        ("Dispatch", "workers/host/engine_intake.py", "EngineIntake.add"),
        ("Dispatch", "workers/process/keeper.py", "EngineKeeper.add"),
        ("Plan and compute", "engine/scheduling/planner.py", "Planner.plan"),
        ("Plan and compute", "registry/checkpoints/families.py", "FAMILIES"),
        ("Send tokens", "workers/host/generations/frames.py", "token_frames"),
        ("Free", "engine/step/live_requests.py", "LiveRequests.finish"),
        ("Free", "engine/scheduling/planner.py", "Planner.remove"),
        ("Free", "engine/kv/block_tables.py", "BlockTables.release"),
        ("Free", "engine/kv/block_pool.py", "BlockPool.free"),
        ("End", "workers/host/endings/finalizer.py", "GenerationFinalizer.start"),
        ("End", "scheduler/stages/end.py", "finish"),
        ("End", "scheduler/stages/watch.py", "ended"),
        ("Made", "registry/pricing.py", "cost"),
        ("Stored", "telemetry/store/tables.py", "table_of"),
    ],
)
def test_a_newcomer_finds_where(step: str, file: str, symbol: str) -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    said = re.search(rf"^\d+\. \*\*{step}\.\*\*((?:.|\n)+?)(?=^\d+\. |^$)", text, re.MULTILINE)
    assert said is not None
    assert f"`{file}`" in said[1]
    assert symbol in defined_in(ROOT / file)


def defined_in(path: Path) -> set[str]:
    """Return the names that a module defines, and ``Class.method`` of its classes."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (
                one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found
