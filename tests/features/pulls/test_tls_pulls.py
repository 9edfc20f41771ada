"""Pulls over TLS: the same blocks arrive, and strangers neither get blocks nor stop the server."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvroute.replica.fabric import server as server_module
from kvroute.replica.fabric.protocol import Row
from kvroute.replica.fabric.pull_speed import measured
from kvroute.replica.fabric.puller import PullEnd, PullRun, Target
from kvroute.replica.fabric.server import BlockPlace, BlockServer
from kvroute.wire.address import TlsMode
from kvroute.wire.tls import OFF, WireTls, client_end, server_ends
from tests.support.certificates import DAY, Authority
from tests.support.waiting import wait_until

ROWS, ROW_BYTES = 6, 100_000  # a row has several records of TLS
KEY = b"k" * 32
MADE = WireTls(is_on=True)
LONG_S, SHORT_S = 60.0, 0.5


@contextlib.contextmanager
def serving(tls: WireTls, kind: type[BlockServer] = BlockServer) -> Iterator[BlockServer]:
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
    places = {bytes([n]): BlockPlace(n, n) for n in range(ROWS)}
    server = kind(
        "127.0.0.1",
        [0],
        key=KEY,
        format_="f",
        find=places.get,
        rows=rows,
        tls=server_ends(tls, KEY),
    )
    try:
        yield server
    finally:
        server.close()


def new_pull() -> tuple[PullRun, np.ndarray]:
    rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
    return PullRun(rows, [[Target(bytes([n]), n) for n in range(ROWS)]]), rows


def pulled(
    server: BlockServer,
    tls: WireTls,
    mode: TlsMode,
    *,
    within_s: float = LONG_S,
    key: bytes = KEY,
) -> PullEnd:
    run, _ = new_pull()
    deadline_s = time.monotonic() + within_s
    end = partial(client_end, tls, mode, key)
    return run.run(server.address, key=key, format_="f", deadline_s=deadline_s, tls=end)


@pytest.mark.parametrize("kind", ["made", "files"])
def test_all_blocks_arrive(kind: TlsMode, tmp_path: Path) -> None:
    tls = MADE if kind == "made" else Authority(tmp_path / "authority").issue("node")
    with serving(tls) as server:
        run, rows = new_pull()
        end = run.run(
            server.address,
            key=KEY,
            format_="f",
            deadline_s=time.monotonic() + LONG_S,
            tls=partial(client_end, tls, kind, KEY),
        )
        assert (len(end.arrived), end.reason) == (ROWS, "")
        assert (rows == server._rows).all()


def test_a_puller_with_another_key_or_without_tls_gets_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(MADE) as server:
        assert pulled(server, MADE, "made", key=b"o" * 32).reason == "lost"
        assert "from an authority with another key" in caplog.text
        assert pulled(server, OFF, "off", within_s=SHORT_S).reason == "late"
        assert len(pulled(server, MADE, "made").arrived) == ROWS


def test_a_bad_certificate_is_named_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "authority")
    good, old = authority.issue("node"), authority.issue("old", age=3 * DAY, rest=-DAY)
    foreign = Authority(tmp_path / "foreign").issue("node")._replace(ca=str(authority.file))
    with serving(good) as server:
        assert pulled(server, old, "files").reason in ("lost", "refused")
        assert pulled(server, foreign, "files").reason in ("lost", "refused")
        assert pulled(server, MADE, "files").reason == "lost"  # it has no files
        wait_until(lambda: "certificate of the puller is not from" in caplog.text, 10)
    assert "the certificate of the puller has expired; renew" in caplog.text
    assert "set --wire-tls-cert, --wire-tls-key and --wire-tls-ca here, too" in caplog.text


def test_clients_without_a_handshake_are_closed_and_stop_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "PROOF_S", SHORT_S)
    with serving(MADE) as server:
        host, port = server.address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(5)]
        silent[0].sendall(b"\x16\x03\x01")
        silent[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        # A pull that this machine does not begin within SHORT_S is refused, too.
        wait_until(lambda: len(pulled(server, MADE, "made").arrived) == ROWS)
        for each in silent:
            each.settimeout(LONG_S)
            with contextlib.suppress(ConnectionError):
                while each.recv(100):
                    pass
            each.close()
        wait_until(lambda: not server._peers, 10)
    assert "the puller has made no TLS handshake" in caplog.text


def test_a_server_that_sends_too_slowly_is_given_up_in_time() -> None:
    class Slow(BlockServer):
        def _sent(self, row: Row) -> Row:
            time.sleep(2 * SHORT_S)
            return row

    with serving(MADE, Slow) as server:
        end = pulled(server, MADE, "made", within_s=SHORT_S)
    assert (end.arrived, end.reason) == ([], "late")


def test_a_pull_can_be_aborted_from_another_thread() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    class Hanging(BlockServer):
        def _sent(self, row: Row) -> Row:
            hangs.set()
            goes_on.wait(LONG_S)
            return row

    ends: list[PullEnd] = []
    with serving(MADE, Hanging) as server:
        run, _ = new_pull()
        thread = threading.Thread(
            target=lambda: ends.append(
                run.run(
                    server.address,
                    key=KEY,
                    format_="f",
                    deadline_s=time.monotonic() + LONG_S,
                    tls=partial(client_end, MADE, "made", KEY),
                )
            )
        )
        thread.start()
        assert hangs.wait(LONG_S)
        run.abort()
        thread.join(LONG_S)
        assert [end.reason for end in ends] == ["off"]
        goes_on.set()


def test_a_server_that_closes_ends_pulls_at_once() -> None:
    hangs = threading.Event()

    class Hanging(BlockServer):
        def _sent(self, row: Row) -> Row:
            hangs.set()
            wait_until(lambda: self._is_closed, LONG_S)
            return row

    ends: list[PullEnd] = []
    with serving(MADE, Hanging) as server:
        thread = threading.Thread(target=lambda: ends.append(pulled(server, MADE, "made")))
        thread.start()
        assert hangs.wait(LONG_S)
    thread.join(LONG_S)
    assert [end.reason for end in ends] == ["lost"]


def test_the_first_speed_is_measured_with_tls() -> None:
    assert measured("127.0.0.1", 100_000, MADE).bytes_per_s > 0


def test_a_stranger_with_an_older_tls_is_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(MADE) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)
