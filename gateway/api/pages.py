"""Chat page and operations page: files of this package, nothing from outside."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parents[1] / "web"
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class _Assets(StaticFiles):
    """Static files with the content policy of the pages."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(SECURITY_HEADERS)
        return response


def routes() -> list[BaseRoute]:
    """Return routes for ``/``, ``/static``, and ``/ops/`` with its assets."""
    return [
        Route("/", _chat, methods=["GET"]),
        Route("/ops", _to_ops, methods=["GET"]),
        Mount("/ops", _Assets(directory=STATIC / "ops", html=True, check_dir=False)),
        Mount("/static", _Assets(directory=STATIC)),
    ]


async def _chat(_request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers=SECURITY_HEADERS)


async def _to_ops(_request: Request) -> Response:
    return RedirectResponse("/ops/", status_code=307)
