"""Versions of turns, and the parameters of a conversation."""

from __future__ import annotations

from playwright.async_api import Page, expect

from tests.gateway.page.windows import MARKS, ask, complete, kept, ready, said
from tests.support.running_gateway import RunningGateway

pytestmark = MARKS


async def test_edits_and_retries_are_versions(front: RunningGateway, page: Page) -> None:
    earlier = page.get_by_role("button", name="Earlier version")
    later = page.get_by_role("button", name="Later version")
    await ask(page, "first")
    await ask(page, "second")
    front.worker.script = lambda _job: "again"
    await page.get_by_role("button", name="Retry").last.click()
    await expect(said(page)).to_have_text(["first", "again"])
    await complete(page)
    await expect(page.locator(".versions").last).to_contain_text("2/2")
    await page.locator(".question").first.hover()
    await page.get_by_role("button", name="Edit this question").first.click()
    await page.get_by_label("Your question").fill("changed")
    await page.get_by_role("button", name="Ask", exact=True).click()
    await expect(page.locator(".asked")).to_have_text(["changed"])
    await complete(page)

    # The way back, also after the page was loaded again, and by the keyboard.
    await page.reload()
    await ready(page)
    await expect(page.locator(".asked")).to_have_text(["changed"])
    await expect(later).to_be_disabled()
    await earlier.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".asked")).to_have_text(["first", "second"])
    await expect(later.first).to_be_focused()
    await earlier.last.click()
    await expect(said(page)).to_have_text(["first", "second"])

    # The next question follows the shown turns in the prompt too.
    front.worker.script = lambda _job: "third answer"
    await ask(page, "third")
    assert [one["content"] for one in await kept(front, page)] == [
        *("first", "first"),
        *("second", "second"),
        *("third", "third answer"),
    ]


async def test_parameters_go_with_each_question(front: RunningGateway, page: Page) -> None:
    await page.get_by_role("button", name="System prompt and parameters").click()
    dialog = page.locator("#parameters")
    await expect(dialog.get_by_label("Temperature")).to_have_value("0")
    await expect(dialog.get_by_label("Top p")).to_have_attribute("placeholder", "1")
    for label, bad, problem in (
        ("Temperature", "hot", "A number from 0 to 2."),
        ("Top p", "0", "A number above 0, up to 1."),
        ("Max tokens per answer", "1.5", "A whole number from 1 to"),
        ("Seed", "-1", "A whole number from 0 to"),
    ):
        field = dialog.get_by_label(label)
        await field.fill(bad)
        await expect(field).to_have_attribute("aria-invalid", "true")
        await expect(dialog.locator(".problem").filter(has_text=problem)).to_be_visible()
    await dialog.get_by_role("button", name="Use these").click()
    await expect(dialog).to_be_visible()
    await expect(dialog.get_by_label("Temperature")).to_be_focused()
    for label, good in (
        ("System prompt", "Be brief."),
        ("Temperature", "0.3"),
        ("Top p", "0.9"),
        ("Max tokens per answer", "5"),
        ("Seed", "7"),
        ("Stop strings", "END\n###"),
    ):
        await dialog.get_by_label(label).fill(good)
    await dialog.get_by_role("button", name="Use these").click()
    await expect(page.get_by_label("Style")).to_have_value("0.3")
    await ask(page, "first question")
    await expect(page.locator(".facts")).to_contain_text("reached the length limit")
    sampling = front.worker.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.3, 0.9, 7)
    assert (sampling.max_tokens, sampling.stop) == (5, ("END", "###"))
    assert [one["role"] for one in await kept(front, page)] == ["system", "user", "assistant"]

    # They stay with the conversation, a retry goes by them, and another one has its own.
    await page.get_by_label("Style").select_option("Free")
    await page.reload()
    await ready(page)
    await expect(page.get_by_label("Style")).to_have_value("1")
    await page.get_by_role("button", name="Retry").click()
    await expect(page.locator(".versions")).to_contain_text("2/2")
    await complete(page)
    assert front.worker.jobs[-1].sampling.temperature == 1

    # Without a system prompt the gateway forgets its stored system prompt.
    await page.get_by_role("button", name="System prompt and parameters").click()
    await dialog.get_by_role("button", name="Empty all").click()
    await dialog.get_by_role("button", name="Use these").click()
    await ask(page, "second")
    contents = [one["role"] for one in await kept(front, page)]
    assert contents == ["user", "assistant", "user", "assistant"]
    await page.locator("#new-chat").click()
    await expect(page.get_by_label("Style")).to_have_value("0")
