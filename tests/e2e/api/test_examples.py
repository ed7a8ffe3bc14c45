"""The examples of the documents, run against the system as their readers would."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.chromium import chromium
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.repository import ROOT
from tests.support.system import System

pytestmark = pytest.mark.e2e


@pytest.mark.browser
async def test_the_chat_in_one_file_keeps_a_conversation(system: System, examples: str) -> None:
    async with chromium() as browser:
        page = await browser.new_page()
        await page.goto(f"{examples}/chat.html?gateway={system.http}")
        await expect(page.locator("small")).to_have_text("open")
        for number, question in enumerate(("What is TTFT?", "What is a KV cache?"), start=1):
            await page.get_by_label("Message").fill(question)
            await page.keyboard.press("Enter")
            answers = page.locator("output.answer")
            await expect(answers).to_have_count(number)
            await expect(answers.last).to_contain_text(".", timeout=20_000)


def test_a_stream_is_read_to_its_end(system: System) -> None:
    finished = subprocess.run(
        [sys.executable, "docs/examples/resume_stream.py", system.http, "What is TTFT?"],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "first token" in finished.stdout.lower()


@pytest.mark.parametrize("page", ["README.md", "docs/first-request.md"])
def test_the_first_client_prints_an_answer(system: System, page: str) -> None:
    block = re.search(r"```python\n(from openai .*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block is not None
    assert "http://127.0.0.1:8000" in block[1]
    program = block[1].replace("http://127.0.0.1:8000", system.http)
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "lease" in finished.stdout.lower() or "worker" in finished.stdout.lower()


def test_the_commands_of_the_readme_work_in_their_order(tmp_path: Path) -> None:
    """The README's `millrace` commands, on a system of their own because the last ends it."""
    lines = re.findall(r"^millrace (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    values = {"NAME": "tiny", "PATH": str(write_checkpoint(tmp_path / "tiny"))}
    system = System(tmp_path / "data", ("--port", "0")).start()
    printed = {}
    try:
        for words in commands:
            arguments = [values.get(word, word) for word in words]
            finished = subprocess.run(
                [sys.executable, "-m", "millrace", *arguments, "--data", str(system.data)],
                capture_output=True,
                text=True,
                timeout=60.0,
                check=False,
            )
            assert finished.returncode == 0, (words, finished.stdout, finished.stderr)
            printed[words[0]] = finished.stdout
        assert list(printed) == ["status", "publish", "models", "keys", "sql", "down"]
        assert "demo" in printed["status"]
        assert "key" in printed["publish"].lower()
        assert printed["keys"].startswith("mr-")
        assert "demo" in printed["sql"]
    finally:
        assert system.stop() == 0
