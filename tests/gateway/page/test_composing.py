"""Files of a question, its display, and the page's message without a worker."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from playwright.async_api import Page, expect

from millrace.bus.memory import MemoryBus
from tests.gateway.page.windows import MARKS, ask, complete, ready, said
from tests.support.adapters import write_adapter
from tests.support.echo_worker import EchoWorker
from tests.support.running_gateway import ADAPTABLE, RunningGateway

pytestmark = MARKS

PASTE = """([selector, text]) => {
  const data = new DataTransfer();
  data.setData("text/plain", text);
  const how = { clipboardData: data, bubbles: true, cancelable: true };
  const paste = new ClipboardEvent("paste", how);
  if (document.querySelector(selector).dispatchEvent(paste)) throw new Error("not taken");
}"""
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const place = document.querySelector("#page");
  const how = { dataTransfer: data, bubbles: true, cancelable: true };
  for (const type of ["dragover", "drop"]) place.dispatchEvent(new DragEvent(type, how));
}"""


async def test_files_go_with_a_question(front: RunningGateway, page: Page) -> None:
    files = page.locator("#attach-file")
    chips = page.locator("#attachments li")
    trouble = page.locator("#attach-trouble")
    await files.set_input_files(
        {"name": "mill.py", "mimeType": "", "buffer": b'print("```")\r\n'},
    )
    await expect(chips).to_have_text(["mill.py 13 tokens"])
    await page.evaluate(DROP, ["rows.csv", "a,b\n1,2\n"])
    await page.evaluate(PASTE, ["#prompt", "line\n" * 60])
    await expect(chips).to_have_count(3)
    for name, data, problem in (
        ("a.png", b"\x89PNG\r\n\x1a\n\xff", "a.png is not text"),
        ("b.bin", b"a\0b", "b.bin is a binary file"),
        ("c.txt", b" ", "c.txt is empty"),
        ("d.txt", b"x" * 3_000, "d.txt is too long with the files already attached: 3,321 tokens"),
        ("e.txt", b"x" * 1_000_001, "e.txt is too large"),
    ):
        await files.set_input_files({"name": name, "mimeType": "", "buffer": data})
        await expect(trouble).to_contain_text(problem)
    await expect(chips).to_have_count(3)
    await page.get_by_role("button", name="Remove pasted.txt").click()
    await expect(chips).to_have_count(2)
    await expect(trouble).to_be_hidden()
    await ask(page, "What is this?")
    await expect(chips).to_have_count(0)
    blocks = ['mill.py\n````python\nprint("```")\n````', "rows.csv\n```csv\na,b\n1,2\n```"]
    asked = "\n\n".join([*blocks, "What is this?"])
    assert bytes(front.worker.jobs[-1].prompt_token_ids or ()).decode() == asked


async def test_a_long_question_is_folded(page: Page) -> None:
    await page.evaluate(PASTE, ["#prompt", "a line\n" * 50])
    await expect(page.locator("#attachments")).to_contain_text("pasted.txt")
    await page.locator("#send").click()
    await complete(page)
    folded = page.locator(".asked > div")
    toggle = page.get_by_role("button", name="Show all 53 lines")
    await expect(toggle).to_have_attribute("aria-expanded", "false")
    height = await folded.evaluate("one => one.clientHeight")
    await toggle.click()
    less = page.get_by_role("button", name="Show less")
    await expect(less).to_have_attribute("aria-expanded", "true")
    assert await folded.evaluate("one => one.clientHeight") > 2 * height


async def test_the_page_says_that_no_worker_is_there(front: RunningGateway, page: Page) -> None:
    await front.worker.close()
    await front.worker.announce(retired=True)
    await page.locator("#prompt").fill("anybody?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".status")).to_contain_text("No worker serves echo now")
    await expect(page.locator("#notice")).to_contain_text("No worker serves echo now.")
    worker = EchoWorker(MemoryBus(front.broker), worker_id="echo-2")
    await worker.start()
    try:
        await expect(said(page)).to_have_text("anybody?")
        await complete(page)
        await expect(page.locator("#notice")).to_be_hidden()
    finally:
        await worker.close()


async def test_an_adapter_answers_by_its_name(
    front: RunningGateway, page: Page, tmp_path: Path
) -> None:
    body = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql", ADAPTABLE))}
    async with httpx.AsyncClient(base_url=front.url) as http:
        assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    await page.reload()
    await ready(page)
    await page.locator("#model").select_option("sql")
    await ask(page, "in rows")
    assert front.worker.jobs[-1].adapter == "sql"
    await expect(page.locator("#notice")).to_be_hidden()


async def test_search_theme_and_files(page: Page, tmp_path: Path) -> None:
    await ask(page, "water and $x^2$")
    await page.locator("#new-chat").click()
    await ask(page, "stone in the river")
    entries = page.locator("#sessions .choose")
    await page.keyboard.press("Control+k")
    await expect(page.get_by_label("Search conversations")).to_be_focused()
    await page.keyboard.type("WATER x^2")
    await expect(entries).to_have_count(1)
    await expect(page.locator("#found")).to_have_text("1 found")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(said(page)).to_contain_text("water")
    await page.get_by_label("Search conversations").fill("nowhere")
    await expect(page.locator("#no-sessions")).to_have_text("Nothing found.")
    await page.get_by_label("Search conversations").press("Escape")
    await expect(entries).to_have_count(2)

    # Saved, and brought back as another conversation.
    saved = {}
    for kind in ("Markdown", "JSON"):
        await page.locator("#sessions li").filter(has_text="water").hover()
        more = page.get_by_role("button", name="More for water and $x^2$")
        if await more.get_attribute("aria-expanded") == "false":
            await more.click()
        async with page.expect_download() as download:
            await page.get_by_role("button", name=f"Save water and $x^2$ as {kind}").click()
        file = await download.value
        saved[file.suggested_filename] = Path(await file.path()).read_text()
    assert list(saved) == ["water-and-x-2.md", "water-and-x-2.json"]
    assert (
        "## Question\n\nwater and $x^2$\n\n## Answer\n\nwater and $x^2$"
        in saved["water-and-x-2.md"]
    )
    document = json.loads(saved["water-and-x-2.json"])
    picker = page.locator("#import-file")
    for bad, problem in (
        ("{", "not JSON"),
        ('{"format": "x"}', "not a conversation"),
        (
            json.dumps({**document, "turns": [{"id": 1}]}),
            "damaged",
        ),
    ):
        await picker.set_input_files({"name": "x.json", "mimeType": "", "buffer": bad.encode()})
        await expect(page.locator("#import-trouble")).to_contain_text(problem)
    document["title"] = "<b>Back</b>"
    document["turns"][0]["parent"] = document["turns"][0]["id"]
    again = json.dumps(document).encode()
    await picker.set_input_files({"name": "x.json", "mimeType": "", "buffer": again})
    await expect(entries.first).to_have_text("<b>Back</b>")
    await expect(said(page)).to_contain_text("water")

    # The theme is kept, and the operations page has it, too.
    html = page.locator("html")
    await page.get_by_role("button", name="Settings").click()
    for theme in ("Dark", "Light"):
        await page.get_by_label("Theme").select_option(theme)
        await expect(html).to_have_attribute("data-theme", theme.lower())
    await page.reload()
    await ready(page)
    await page.emulate_media(color_scheme="dark")
    await expect(html).to_have_attribute("data-theme", "light")
    await page.evaluate("localStorage.removeItem('millrace.theme')")
    await page.reload()
    await expect(html).to_have_attribute("data-theme", "dark")
    await page.goto(page.url.partition("#")[0] + "ops/")
    await expect(html).to_have_attribute("data-theme", "dark")
