"""Takes the screenshots of README: `python docs/images/take.py http://127.0.0.1:8000`.

Asks the system at that address a few questions first, so that the pages have something to show.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

_FOLDER = Path(__file__).parent
_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_QUESTIONS = ("What is TTFT?", "What is a KV cache?", "What happens when a worker dies?")


def main(address: str) -> None:
    """Write chat.png and operations.png beside this file."""
    for question in _QUESTIONS * 5:
        body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(  # noqa: S310 (an address of the user's own)
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).read()  # noqa: S310
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1200, "height": 720})
        page.goto(address)
        for question in _QUESTIONS[:2]:
            page.get_by_role("textbox", name="Message").fill(question)
            page.keyboard.press("Enter")
            page.wait_for_timeout(4000)
        page.screenshot(path=_FOLDER / "chat.png")
        page.goto(f"{address}/ops")
        page.get_by_text("Live", exact=True).wait_for()
        page.screenshot(path=_FOLDER / "operations.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
