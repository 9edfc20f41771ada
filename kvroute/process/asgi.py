"""Requests to an HTTP application of the same process, over ASGI."""

from collections.abc import Iterable
from typing import Any


def post_scope(path: str, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the ASGI scope of a POST request, without addresses.

    Args:
        path: the route.
        headers: names in lower case, and values.
    """
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers],
        "client": None,
        "server": None,
        "state": {},
    }
