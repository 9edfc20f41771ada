"""The live page's files and made-up events, from a small server in this process."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvroute.router.endpoints.ui_routes import HEADERS, PAGE, TYPES
from tests.support.repository import ROOT

UI = ROOT / "router" / "ui"
JSON = "application/json"


@dataclass
class PageServer:
    """What pages are told, and what they asked for."""

    state: Mapping[str, Any]
    key: str = ""  # pages have to send it; empty: none
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
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
    """A server that tells all pages this state, once."""
    told = PageServer(state, key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = told.answer(self.path, self.headers["authorization"] or "")
            self.send_response(status)
            for name, value in (HEADERS | {"content-type": kind}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
            if kind == "text/event-stream":
                told.over.wait()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        told.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
