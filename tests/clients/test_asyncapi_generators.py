"""The AsyncAPI document as the official parser and generator read it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.packages import need, npm_packages
from tests.support.repository import ROOT

PACKAGES = ("@asyncapi/parser@3.6.6", "@asyncapi/modelina@5.10.1", "typescript@5.9.3")
PROGRAM = ROOT / "tests" / "clients" / "asyncapi" / "generate.mjs"
INSTALLED_WITHIN_S = 900
WITHIN_S = 120.0


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command and return its output. Raises AssertionError with its output if it fails."""
    done = subprocess.run(
        ["nice", *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3_000:]}{done.stderr[-3_000:]}"
    return done.stdout


@pytest.mark.timeout(INSTALLED_WITHIN_S)
@pytest.mark.slow(reason="parses the document and generates classes in four languages, with Node")
def test_generators_make_classes_with_names_that_compile(tmp_path: Path) -> None:
    need("npm", "node", "javac", "go")
    packages = npm_packages("asyncapi", *PACKAGES)
    # A module finds packages beside itself only.
    program = packages / PROGRAM.name
    program.write_bytes(PROGRAM.read_bytes())
    document: dict[str, Any] = json.loads(
        run(["node", program, ROOT / "docs" / "asyncapi.json", tmp_path], packages)
    )
    assert {one["code"] for one in document["said"]} <= {"asyncapi-latest-version"}
    assert {"Job", "JobJson", "Frame", "FrameJson", "JobResultJson"} <= set(document["messages"])
    for language, names in document["names"].items():
        assert {"Job", "ChatMessage", "JobResult", "Delta", "Done", "Tier"} <= set(names), language
        assert not [name for name in names if "nonymous" in name], language
    sources = {name: tmp_path / name / "millrace" for name in document["names"]}
    run(["javac", "-proc:none", "-d", "classes", *sources["java"].glob("*.java")], tmp_path)
    (sources["go"] / "go.mod").write_text("module millrace\n\ngo 1.24\n")
    run(["go", "vet", "."], sources["go"])
    run(["python3", "-m", "compileall", "-q", "."], sources["python"])
    modules = ("--module", "nodenext", "--moduleResolution", "nodenext")
    typescript = list(sources["typescript"].glob("*.ts"))
    run(
        [packages / "node_modules/.bin/tsc", "--noEmit", "--strict", *modules, *typescript],
        tmp_path,
    )
