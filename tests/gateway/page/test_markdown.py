"""Answers of a model, shown as Markdown and never as markup."""

from __future__ import annotations

import re

from playwright.async_api import Page, expect

from tests.gateway.page.windows import (
    MARKS,
    ask,
    said,
)
from tests.support.running_gateway import RunningGateway

pytestmark = MARKS


async def test_markdown_is_shown_and_markup_is_not(front: RunningGateway, page: Page) -> None:
    front.worker.script = lambda _job: [
        "# Title\n\nSome **bold",
        "** and `co",
        "de`.\n\n- one\n- two\n  - three\n\n",
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n",
        "```python\nprint('<b>')\n",
        "```\n\n> quoted\n\n",
        "<img src=x onerror=alert(1)> </script><script>alert(2)</script>\n\n",
        "[bad](javascript:alert(3)) [worse](data:text/html,x) [good](https://example.com/)\n\n",
        "![picture](https://example.com/x.png) <https://example.com/y>",
    ]
    await ask(page, "show")
    answer = said(page)
    await expect(answer.locator("h3")).to_have_text("Title")
    await expect(answer.locator("strong")).to_have_text("bold")
    await expect(answer.locator("p code")).to_have_text("code")
    await expect(answer.locator("li li")).to_have_text("three")
    await expect(answer.locator("td.end")).to_have_text("2")
    await expect(answer.locator("figcaption")).to_contain_text("python")
    await expect(answer.locator("pre code")).to_have_text("print('<b>')")
    await expect(answer.locator("blockquote")).to_have_text("quoted")
    await expect(answer).to_contain_text("<img src=x onerror=alert(1)> </script><script>")
    await expect(answer).to_contain_text("[bad](javascript:alert(3)) [worse](data:text/html,x)")
    await expect(answer.locator("img, script, b, iframe")).to_have_count(0)
    links = answer.locator("a")
    hrefs = await links.evaluate_all("links => links.map(link => link.href)")
    assert hrefs == [f"https://example.com/{path}" for path in ("", "x.png", "y")]
    assert await links.first.get_attribute("rel") == "noopener noreferrer nofollow"


async def test_hostile_markdown_is_shown_at_once(page: Page) -> None:
    marks = [
        "\\(a ",
        "\\[a\n",
        "$a",
        "$$a ",
        "*a ",
        "_a",
        "**a*",
        "[",
        "[a](",
        "`",
        "`a``b",
        "~~a",
        ">",
        "> ",
        "- ",
        "1. ",
        "|",
        "<",
    ]
    lines = ["$$\n", "a\n\n$$", "- a\n  ", "|a|\n", "> - ", "```\n", "# \n", "https://a_", "a\n\n"]
    took_ms = await page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/static/chat/markdown.js");
          return texts.map((text) => {
            const before = performance.now();
            new Markdown(document.createElement("div")).show(text);
            return performance.now() - before;
          });
        }""",
        [text * (20_000 // len(text)) for text in (*marks, *lines)],
    )
    assert max(took_ms) < 1_000, dict(zip((*marks, *lines), took_ms, strict=True))


async def test_marks_within_a_line(page: Page) -> None:
    expected = {
        "a_b_c 2 * 3 * 4": "a_b_c 2 * 3 * 4",
        "*a* **b** ***c*** ~~d~~": "<em>a</em> <strong>b</strong> <em><strong>c</strong></em> "
        "<del>d</del>",
        "**a `*` and *b***": "<strong>a <code>*</code> and <em>b</em></strong>",
        "\\*a\\* **open *x": "*a* **open *x",
        "one  \ntwo\nthree": "one<br>\ntwo<br>\nthree",
        "&lt; <b>x</b>": "&amp;lt; &lt;b&gt;x&lt;/b&gt;",
        "$5 and $10, US$3 or 4$ and 5$": "$5 and $10, US$3 or 4$ and 5$",
        "a \\$5$ $ x$ $5-$10 $5 to y$": "a $5$ $ x$ $5-$10 $5 to y$",
        "[x]( JaVaScRiPt:a) [y](//e.com) [z](/r)": "[x]( JaVaScRiPt:a) [y](//e.com) [z](/r)",
    }
    shown = await page.evaluate(
        """async (texts) => {
          const { Markdown } = await import("/static/chat/markdown.js");
          return texts.map((text) => {
            const root = document.createElement("div");
            new Markdown(root).show(text);
            return root.firstChild.innerHTML;
          });
        }""",
        list(expected),
    )
    assert dict(zip(expected, shown, strict=True)) == expected


async def test_markdown_is_the_same_however_it_streams(page: Page) -> None:
    text = (
        "# A\n\npara *one*\nline\n\n1. x\n\n   more\n2. y\n\n```js\nlet a = `b`;\n\n// c\n```\n"
        "after\n\n> q\n> - r\n\n|a|b|\n|-|-|\n|c|d|\n\nend"
    )
    wholes = await page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/static/chat/markdown.js");
          const shown = (step) => {
            const root = document.createElement("div");
            const markdown = new Markdown(root);
            for (let end = step; end < text.length; end += step) markdown.show(text.slice(0, end));
            markdown.show(text);
            return root.innerHTML;
          };
          return [1, 3, 7, 1000].map(shown);
        }""",
        text,
    )
    assert len(set(wholes)) == 1


async def test_formulas_are_drawn(front: RunningGateway, page: Page) -> None:
    """Formulas are drawn while they stream; broken ones and sums of money stay text."""
    before = await page.evaluate("typeof katex")
    front.worker.script = lambda _job: [
        "The mean is \\(\\bar{x}_n*y*\\) and $a_1*b*$, for $5 and $10.\n\nAs in\n",
        "$$\n\\frac{1}{n} \\sum_i x_i\n\n",
        "\\[ E = mc^2 \\]\n\n- an item with $$\\alpha$$\n\n",
        "Broken: $\\frac{1$ and \\(\\href{javascript:alert(1)}{x}\\).\n\n",
        "`$code$` and\n\n```\n$$x$$\n```\n",
    ]
    await ask(page, "formulas")
    answer = said(page)
    drawn = answer.locator(".math .katex-mathml annotation")
    await expect(drawn).to_have_text(
        [r"\bar{x}_n*y*", "a_1*b*", "E = mc^2", r"\alpha", r"\href{javascript:alert(1)}{x}"]
    )
    assert before == "undefined"
    await expect(answer.locator(".math.display")).to_have_count(2)
    await expect(answer.locator("p").first).to_contain_text("for $5 and $10.")
    await expect(answer.locator(".formula.open")).to_have_text("$$ \\frac{1}{n} \\sum_i x_i")
    broken = answer.locator(".formula.broken")
    await expect(broken).to_have_text(r"$\frac{1$")
    await expect(broken).to_have_attribute("title", re.compile("expected"))
    await expect(answer.locator("a[href], .math script")).to_have_count(0)
    await expect(answer.locator("pre code")).to_have_text("$$x$$")
    await expect(answer.locator("p code").last).to_have_text("$code$")
    assert await page.evaluate("document.fonts.check('16px KaTeX_Main')")


async def test_formulas_are_drawn_while_the_answer_streams(
    front: RunningGateway, page: Page
) -> None:
    front.worker.script = lambda _job: ["So $x^2$ and \\(", "y", "\\) and", " $z$."]
    front.worker.stop_before = 3
    await page.locator("#prompt").fill("stream")
    await page.keyboard.press("Enter")
    await expect(said(page).locator(".math")).to_have_count(2)
    await expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    await page.keyboard.press("Escape")
