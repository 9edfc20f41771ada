"""A scripted server that ends its answers when a test says so."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.scripted_model import HOST, Handler, Json

FIRST = "first"  # the text with which each answer begins
LONGEST_S = 60.0  # seconds after which an answer ends anyway


class Gated(Handler):
    """Begins the answer to each request as a stream, and ends it later."""

    def respond(self, body: Json) -> None:
        assert isinstance(self.server, GatedServer)
        if self.path != "/v1/responses":  # kvroute also asks how a body is rendered
            super().respond(body)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self._event("response.created", sequence_number=0, response={"id": "resp_1"})
        self._event("response.output_text.delta", sequence_number=1, delta=FIRST)
        self.server.ends.wait(LONGEST_S)
        usage = {"output_tokens": 1}
        self._event("response.completed", sequence_number=2, response={"usage": usage})
        self.close_connection = True

    def _event(self, kind: str, **fields: Any) -> None:
        event = json.dumps({"type": kind, **fields})
        self.wfile.write(f"event: {kind}\ndata: {event}\n\n".encode())
        self.wfile.flush()


class GatedServer(ThreadingHTTPServer):
    """The server. Its answers end when `ends` is set."""

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Gated)
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}"


@contextmanager
def gated_server(host: str = HOST) -> Iterator[GatedServer]:
    """Run a server in a thread, at an address of this machine."""
    with GatedServer(host) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
