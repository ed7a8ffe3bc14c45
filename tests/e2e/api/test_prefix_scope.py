"""Prefix cache of one tenant: it speeds up that tenant and reveals nothing to another."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid

import httpx
import pytest

from tests.support.system import System

pytestmark = pytest.mark.e2e


def _headers(system: System) -> dict[str, str]:
    """A key of a tenant of its own."""
    made = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "millrace.cli",
                "keys",
                "create",
                "--tenant",
                f"t-{uuid.uuid4().hex}",
            ),
            *("--json", "--data", str(system.data)),
        ],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
    )
    return {"authorization": f"Bearer {json.loads(made.stdout)['key']}"}


async def _num_cached(http: httpx.AsyncClient, headers: dict[str, str], prompt: str) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


async def test_another_tenant_finds_nothing_cached(system: System, http: httpx.AsyncClient) -> None:
    prompt = f"{uuid.uuid4()} " * 8
    one, other = _headers(system), _headers(system)
    assert await _num_cached(http, one, prompt) == 0
    assert await _num_cached(http, one, prompt) > 0
    assert await _num_cached(http, other, prompt) == 0
    assert await _num_cached(http, other, prompt) > 0
    # Without a key there is one tenant for all.
    assert await _num_cached(http, {}, prompt) == 0
    assert await _num_cached(http, {}, prompt) > 0


async def test_a_prefix_cache_is_emptied(http: httpx.AsyncClient) -> None:
    prompt = f"{uuid.uuid4()} " * 8
    assert await _num_cached(http, {}, prompt) == 0
    assert await _num_cached(http, {}, prompt) > 0
    answer = await http.post("/reset_prefix_cache", params={"model": "demo"})
    assert answer.status_code == 200, answer.text
    assert {worker["model"] for worker in answer.json()["workers"]} == {"demo"}
    assert await _num_cached(http, {}, prompt) == 0
    assert await _num_cached(http, {}, prompt) > 0
