"""Pages: they run only their own files, and no other page may frame them."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize("path", ["/", "/ops/", "/static/millrace.js"])
async def test_pages_say_what_a_browser_may_do_with_them(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
