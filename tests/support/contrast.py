"""Whether people can read what a page shows, in whatever state it is: WCAG 2.2, 1.4.3."""

from __future__ import annotations

from pathlib import Path

from playwright.async_api import Page

_TEXTS = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


async def unreadable_texts(page: Page) -> list[str]:
    """Texts whose contrast is below 4.5, or below 3 if they are large."""
    texts = await page.evaluate(_TEXTS)
    assert texts, "the page shows no text"
    return [
        f"{one['ratio']:.2f} of {one['least']}: {one['text']!r} in {one['where']}"
        for one in texts
        if one["ratio"] < one["least"]
    ]
