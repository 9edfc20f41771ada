"""A small server in this process that sends the live page's files and made-up events."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvroute.features.page.page_routes import PAGE, TYPES
from kvroute.router.endpoints.docs_routes import HEADERS
from tests.support.repository import ROOT

UI = ROOT / "kvroute" / "features" / "page" / "ui"
JSON = "application/json"


@dataclass
class PageServer:
    """The state that the server sends to pages, and the requests that it got."""

    state: Mapping[str, Any]
    key: str = ""  # the API key that pages have to send; empty: they need none
    asked: list[str] = field(default_factory=list)  # paths of the requests for events
    over: threading.Event = field(default_factory=threading.Event)  # set when the server ends
    url: str = ""

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Return the status, the content type and the body of a response."""
        name = urlsplit(path).path.removeprefix("/")
        if name == "ui" or name.startswith("ui/"):
            file = UI / (name.removeprefix("ui").removeprefix("/") or PAGE)
            return 200, TYPES[file.suffix.removeprefix(".")], file.read_bytes()
        if self.key and authorization != f"Bearer {self.key}":
            return 401, JSON, b"{}"
        if name == "v1/models":
            return 200, JSON, json.dumps({"data": [{"id": "m"}]}).encode()
        self.asked.append(path)
        state = dict(self.state)
        if replica := parse_qs(urlsplit(path).query).get("replica"):
            state["history"] = state["history"] | {"replica": replica[0]}
        data = json.dumps({"changed": state, "gone": []})
        return 200, "text/event-stream", f"event: whole\ndata: {data}\n\n".encode()


@contextmanager
def serve(state: Mapping[str, Any], *, key: str = "") -> Iterator[PageServer]:
    """Run a server that sends this state once to each page."""
    page_server = PageServer(state, key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            authorization = self.headers["authorization"] or ""
            status, kind, body = page_server.answer(self.path, authorization)
            self.send_response(status)
            for name, value in (HEADERS | {"content-type": kind}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
            if kind == "text/event-stream":
                page_server.over.wait()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    page_server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield page_server
    finally:
        page_server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
