"""The page at `/`: files of serve_apps/page, as they are."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

PAGE = Path(__file__).parent / "page"
HEADERS = {
    # nothing from any other host, whatever a transcript or an answer may hold
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether there is a newer one
}


class Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_page(api: FastAPI) -> None:
    """Needs no key: it holds nothing but itself. Its addresses are relative, so any route prefix will do."""
    api.mount("/page", Files(directory=PAGE))

    @api.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers=HEADERS)
