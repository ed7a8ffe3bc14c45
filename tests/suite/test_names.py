"""Names of public classes: no two packages share one."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.repository import PACKAGES, ROOT, python_files

# Names that two packages share, and why. At most five.
_ONE_THING = "the same part of an answer in OpenAPI and in AsyncAPI"
_SHARED = {
    "ToolCallDelta": _ONE_THING,
    "FunctionDelta": _ONE_THING,
    "CustomDelta": _ONE_THING,
}


def test_no_two_packages_share_the_name_of_a_public_class() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in python_files(package):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].add(path.relative_to(ROOT).parts[0])
    shared = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert len(_SHARED) <= 5
    assert shared.keys() == _SHARED.keys(), shared
