"""Every example of docs/engine.md runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import millrace.engine
from millrace.engine.offline.inputs import ChatOptions
from millrace.registry.catalogue import load_catalogue
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.source import resolve
from tests.support.adapters import write_adapter
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


def test_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    demo = resolve(load_catalogue("").get("demo"))
    adapter = write_adapter(tmp_path / "sql", read_model_config(demo))
    labels = write_checkpoint(
        tmp_path / "labels", architectures=["LlamaForSequenceClassification"], num_labels=3
    )
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```python")
    for block in blocks:
        code = block.replace('"ADAPTER"', repr(str(adapter)))
        code = code.replace('"CLASSIFIER"', repr(str(labels)))
        exec(compile(code, "docs/engine.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "TTFT" in printed or "first token" in printed, "the demo model knows the answer"
    assert "grammar_invalid" in printed


def test_page_names_the_whole_public_interface() -> None:
    missing = [name for name in millrace.engine.__all__ if f"`{name}" not in PAGE]
    assert not missing
    assert not [name for name in ChatOptions.__annotations__ if f"`{name}`" not in PAGE]
