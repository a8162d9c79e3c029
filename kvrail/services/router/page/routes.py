"""The page's paths: `/`, the files that it loads, and the JSON that it shows."""

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvrail.services.router.page.status import StatusPage

FOLDER = Path(__file__).parent
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
"""What the page is made of, by name."""
JSON_PATH = "/status.json"
OPEN_PATHS = frozenset({"/", JSON_PATH, *(f"/page/{name}" for name in FILES)})
"""Paths that need no key: the page is the same for everybody, and its JSON says to each what they may know."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def page_routes(*, operators: bool = False) -> APIRouter:
    """The page. operators: every client that reaches it is one, and sees all."""
    router = APIRouter()
    bodies = {name: (path.read_bytes(), TYPES[path.suffix]) for name, path in FILES.items()}

    def file(name: str) -> Response:
        body, kind = bodies[name]
        return Response(body, media_type=kind, headers=HEADERS)

    @router.get("/", include_in_schema=False)
    @router.head("/", include_in_schema=False)
    async def page() -> Response:
        """Show the cluster."""
        return file("index.html")

    @router.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        """Send a file of the page."""
        if name not in bodies:
            raise HTTPException(404)
        return file(name)

    @router.get(JSON_PATH, include_in_schema=False)
    async def status(request: Request) -> Response:
        """Say what the page shows; with API keys and without one, no more than /health."""
        shown: StatusPage = request.app.state.status_page
        body = shown.body(everything=operators or shown.shows_all(request.state.api_key))
        return Response(body, media_type="application/json", headers=HEADERS | {"cache-control": "no-store"})

    return router
