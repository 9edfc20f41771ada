"""A scripted server that ends its answers when a test says so."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from tests.support.scripted_model import HOST, Handler, Json

FIRST = "first"  # the text with which each answer begins
LONGEST_S = 60.0  # seconds after which an answer ends anyway


class Gated(Handler):
    """Begins the answer to each request as a stream, and ends it later."""

    def respond(self, body: Json) -> None:
        assert isinstance(self.server, GatedServer)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        delta = f'{{"type":"response.output_text.delta","delta":"{FIRST}"}}'
        self.wfile.write(f"data: {delta}\n\n".encode())
        self.wfile.flush()
        self.server.ends.wait(LONGEST_S)
        self.wfile.write(b'data: {"type":"response.completed","response":{}}\n\n')
        self.close_connection = True


class GatedServer(ThreadingHTTPServer):
    """The server. Its answers end when `ends` is set."""

    def __init__(self) -> None:
        super().__init__((HOST, 0), Gated)
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"


@contextmanager
def gated_server() -> Iterator[GatedServer]:
    """Run a server in a thread."""
    with GatedServer() as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server
        finally:
            server.ends.set()
            server.shutdown()
