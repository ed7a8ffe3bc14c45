"""Takes the pictures of the README anew, from a system that runs with the demo model.

    millrace up &
    python -m tests.docs.screenshots [--data DIR]

It asks a few questions first, so that both pages have something to show, and needs Chromium. A
picture that is larger than it may be is not kept, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import urllib.request
from pathlib import Path

from playwright.async_api import Page, expect

from millrace.cli.endpoints import add_data_argument, read_endpoints
from millrace.runtime.addresses import open_directly
from tests.support.chromium import chromium
from tests.support.repository import ROOT
from tests.support.waiting import eventually

FOLDER = ROOT / "docs" / "images"
MAX_BYTES = 150_000
_QUESTIONS = (
    "What is TTFT?",
    "What happens when a worker dies?",
    "What is a KV cache?",
    "What is continuous batching?",
    "Why does Millrace use NATS?",
)
_ROUNDS = 8
_SIZE = {"width": 1200, "height": 780}
_STORED_WITHIN_S = 30.0


async def _take_chat(page: Page, url: str) -> None:
    await page.goto(url)
    for number, question in enumerate(_QUESTIONS[:2], start=1):
        await page.locator("#prompt").fill(question)
        await page.locator("#prompt").press("Enter")
        await expect(page.locator(".asked")).to_have_count(number)
        await expect(page.locator('.answer:not([aria-busy="true"])')).to_have_count(
            number, timeout=60_000
        )
    await page.screenshot(path=FOLDER / "chat.png")


async def _take_ops(page: Page, url: str) -> None:
    await page.goto(f"{url}/ops#range=15m")
    await expect(page.locator("canvas").first).to_be_visible(timeout=60_000)
    await page.wait_for_load_state("networkidle")
    await page.screenshot(path=FOLDER / "ops.png")


def _ask(url: str, question: str) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with open_directly(request, timeout_s=60.0) as answer:
        answer.read()


def _num_stored(url: str) -> int:
    path = f"{url}/ops/api/totals?from_s=-900&to_s=0"
    with open_directly(path, timeout_s=10.0) as answer:
        return int(json.loads(answer.read())[0]["requests"])


async def _take(url: str) -> None:
    for question in _QUESTIONS * _ROUNDS:
        await asyncio.to_thread(_ask, url, question)
    await eventually(lambda: _num_stored(url) >= len(_QUESTIONS) * _ROUNDS, _STORED_WITHIN_S)
    async with chromium() as browser:
        for take in (_take_chat, _take_ops):
            context = await browser.new_context(viewport=_SIZE, color_scheme="light")  # type: ignore[arg-type]
            await take(await context.new_page(), url)
            await context.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docs.screenshots", description=__doc__)
    add_data_argument(parser)
    data: Path = parser.parse_args().data
    endpoints = read_endpoints(data)
    if endpoints is None:
        print(f"Nothing runs on {data}: start it with millrace up.", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    asyncio.run(_take(endpoints.http))
    code = 0
    for name in ("chat.png", "ops.png"):
        size = (FOLDER / name).stat().st_size
        print(f"{FOLDER.relative_to(ROOT) / name}: {size:,} bytes")
        if size > MAX_BYTES:
            print(f"more than {MAX_BYTES:,}", file=sys.stderr)
            (FOLDER / name).unlink()
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
