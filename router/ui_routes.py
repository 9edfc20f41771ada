"""The live page's files, which lie in `ui/`, as HTTP answers."""

from collections.abc import Mapping
from importlib.resources import files

from fastapi import Response

from router.errors import ApiError

PAGE = "index.html"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # The page shows what others wrote: nothing of it may run, or be sent elsewhere.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def read_files() -> Mapping[str, bytes]:
    """All of them by name."""
    return {
        file.name: file.read_bytes()
        for file in files("router").joinpath("ui").iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }


def file(found: Mapping[str, bytes], name: str) -> Response:
    """404 as ApiError for what is none of them."""
    if name not in found:
        raise ApiError(404, f"There is no file '{name}' of the live page; it begins at /ui.")
    return Response(found[name], headers=HEADERS, media_type=TYPES[name.rpartition(".")[2]])
