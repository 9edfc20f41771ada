"""TLS between routers and replicas: both ends show a certificate, and strangers get nowhere."""

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvroute.local.before_start import check_wire_tls
from kvroute.machine.problem import StartError
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load
from kvroute.wire import server as replicas_end
from kvroute.wire import tls as tls_module
from kvroute.wire.address import TlsMode
from kvroute.wire.contexts import TlsEnd, shake_hands
from kvroute.wire.link import Link, LostError, connect
from kvroute.wire.server import Server
from kvroute.wire.tls import OFF, Refusals, TlsError, WireTls, check_files, client_end, server_ends
from tests.support.certificates import DAY, Authority
from tests.support.waiting import until
from tests.support.wired import Wired

LOOPBACK = "127.0.0.1"
SECRET = b"s" * 32
MADE = WireTls(is_on=True)
LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def echo(body: bytes, rank: int) -> bytes:
    return body


async def never(*_: Any) -> None:
    raise AssertionError


@contextlib.asynccontextmanager
async def served(tls: WireTls) -> AsyncIterator[Server]:
    ends = server_ends(tls, SECRET)
    server = Server(never, {"echo": echo}, max_requests=10, secret=SECRET, tls=ends)
    await server.start(LOOPBACK)
    try:
        yield server
    finally:
        await server.close()


async def linked(server: Server, end: TlsEnd | None, secret: bytes = SECRET) -> Link:
    return await connect("a", LOOPBACK, server.port, secret, within_s=10, tls=end)


async def linked_in_time(server: Server, end: TlsEnd | None) -> Link:
    """Connect to a server with a short PROOF_S, again if this process stood still for as long."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(LostError):
                return await linked(server, end)


def run(loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["made", "files"])
def test_calls_of_any_size_pass_encrypted(
    loop: Callable[[], asyncio.AbstractEventLoop], mode: TlsMode, authority: Authority
) -> None:
    tls = MADE if mode == "made" else authority.issue("node")

    async def main() -> None:
        async with served(tls) as server:
            link = await linked(server, client_end(tls, tls.mode, SECRET))
            assert link.transport is not None
            assert link.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
            for size in (0, 1, 3_000_000):
                assert await link.call("echo", b"x" * size) == b"x" * size
            link.lose(LostError("over"))
            await until(lambda: not server.peers)

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_breaks_is_lost_at_once(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        async with served(MADE) as server:
            link = await linked(server, client_end(MADE, "made", SECRET))
            (peer,) = server.peers
            peer.abort("the test")
            await asyncio.wait_for(link.closed, 60)
            with pytest.raises(LostError):
                await link.call("echo", b"late")

    run(loop, main())


@dataclasses.dataclass
class Case:
    """A handshake that must fail: who refuses, and what its message says."""

    own: str  # name of the router's certificate
    replica: str  # name of the replica's certificate
    said_by: str  # router or replica
    text: str


CASES = (
    Case("good", "expired", "router", "certificate of the replica has expired; renew"),
    Case("expired", "good", "replica", "certificate of the router has expired; renew"),
    Case("good", "foreign", "router", "certificate of the replica is not from the expected"),
    Case("foreign", "good", "replica", "certificate of the router is not from the expected"),
    Case("good", "early", "router", "is not valid yet; compare the clocks"),
    Case("server", "good", "replica", "must have both serverAuth and clientAuth"),
    Case("good", "client", "router", "must have both serverAuth and clientAuth"),
    Case("none", "good", "replica", "the router has sent no certificate"),
)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.own}-{case.replica}")
def test_a_bad_certificate_is_refused_with_the_remedy(
    loop: Callable[[], asyncio.AbstractEventLoop],
    case: Case,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tls_module, "check_files", lambda _: None)  # else the replica cannot start
    foreign = Authority(tmp_path / "foreign").issue("node")
    files = {
        "good": authority.issue("good"),
        "expired": authority.issue("expired", age=3 * DAY, rest=-DAY),
        "early": authority.issue("early", age=-DAY, rest=3 * DAY),
        "foreign": foreign._replace(ca=str(authority.file)),
        "server": authority.issue("server", uses=(ExtendedKeyUsageOID.SERVER_AUTH,)),
        "client": authority.issue("client", uses=(ExtendedKeyUsageOID.CLIENT_AUTH,)),
    }

    async def main() -> None:
        async with served(files[case.replica]) as server:
            if case.own == "none":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(authority.file)
                context.check_hostname = False
                own: TlsEnd | None = TlsEnd(context, b"")
            else:
                own = client_end(files[case.own], "files", SECRET)
            with pytest.raises(LostError) as raised:
                await linked(server, own)
            if case.said_by == "router":
                assert case.text in str(raised.value)
            else:
                await until(lambda: case.text in caplog.text)
                assert "refused this router's certificate" in str(raised.value)
                lines = [record for record in caplog.records if case.text in record.message]
                assert [line.levelname for line in lines] == ["WARNING"]
            await until(lambda: not server.peers)

    run(loop, main())


async def test_processes_with_another_secret_refuse_each_others_certificates() -> None:
    async with served(MADE) as server:
        with pytest.raises(LostError, match="from an authority with another key"):
            await linked(server, client_end(MADE, "made", b"o" * 32), b"o" * 32)


async def test_the_secret_is_needed_besides_a_certificate(authority: Authority) -> None:
    tls = authority.issue("node")
    async with served(tls) as server:
        with pytest.raises(LostError, match="certificate or proof"):
            await linked(server, client_end(tls, "files", SECRET), b"another secret")


async def test_a_process_in_between_cannot_pass_on_the_proofs(authority: Authority) -> None:
    """It has a certificate of the same authority, but does not know the secret."""
    tls, other = authority.issue("node"), authority.issue("other")
    async with served(tls) as server:
        ends, own = server_ends(other, b""), client_end(other, "files", b"")
        assert ends is not None
        assert own is not None

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(LOOPBACK, server.port, ssl=own.context)
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

        between = await asyncio.start_server(pass_on, LOOPBACK, 0, ssl=ends().context)
        async with between:
            port = between.sockets[0].getsockname()[1]
            with pytest.raises(LostError):
                await connect(
                    "a",
                    LOOPBACK,
                    port,
                    SECRET,
                    within_s=10,
                    tls=client_end(tls, "files", SECRET),
                )
        await until(lambda: not server.peers)


def read_all(stranger: socket.socket) -> None:
    while stranger.recv(100):
        pass


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
    writer.close()


def test_older_versions_of_tls_are_refused() -> None:
    ends, end = server_ends(MADE, SECRET), client_end(MADE, "made", b"old" + SECRET[3:])
    assert ends is not None
    assert end is not None
    end.context.minimum_version = ssl.TLSVersion.TLSv1_2
    end.context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake_hands(ends().context, end.context)


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", random.Random(0).randbytes(99)]
)
@pytest.mark.parametrize("loop", LOOPS)
def test_clients_without_a_handshake_are_closed_and_stop_nobody(
    loop: Callable[[], asyncio.AbstractEventLoop],
    said: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(replicas_end, "PROOF_S", 0.3)
    monkeypatch.setattr(replicas_end, "MAX_UNPROVEN", 5)

    async def main() -> None:
        async with served(MADE) as server:
            link = await linked_in_time(server, client_end(MADE, "made", SECRET))
            strangers = [socket.create_connection((LOOPBACK, server.port)) for _ in range(20)]
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                stranger.settimeout(60)
            assert await link.call("echo", b"fine") == b"fine"
            for stranger in strangers:  # each one is closed
                with contextlib.suppress(ConnectionError):
                    await asyncio.to_thread(read_all, stranger)
                stranger.close()
            again = await linked_in_time(server, client_end(MADE, "made", SECRET))
            assert await again.call("echo", b"fine") == b"fine"
            assert len(server.peers) == 2

    run(loop, main())
    assert "TLS" in caplog.text
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 3


async def test_silent_clients_keep_no_router_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_end, "MAX_UNPROVEN", 5)
    async with served(MADE) as server:
        strangers = [socket.create_connection((LOOPBACK, server.port)) for _ in range(20)]
        link = await linked(server, client_end(MADE, "made", SECRET))
        assert await link.call("echo", b"fine") == b"fine"
        for stranger in strangers:
            stranger.close()


async def test_a_router_without_tls_gets_no_byte_and_the_replica_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas_end, "PROOF_S", 0.1)
    async with served(MADE) as server:
        with pytest.raises(LostError):
            await linked(server, None)
        assert "the router has made no TLS handshake" in caplog.text


async def test_a_router_with_tls_is_told_that_the_replica_has_none() -> None:
    async with served(OFF) as server:
        with pytest.raises(LostError, match="the replica does not use TLS"):
            await linked(server, client_end(MADE, "made", SECRET))


def test_a_router_without_files_is_told_to_set_them() -> None:
    with pytest.raises(TlsError, match="set --wire-tls-cert"):
        client_end(MADE, "files", SECRET)
    assert client_end(MADE, "off", SECRET) is None
    assert server_ends(OFF, SECRET) is None


async def test_a_renewed_certificate_is_used_for_the_next_connection(authority: Authority) -> None:
    tls = authority.issue("node")
    async with served(tls) as server:
        seen = []
        for _ in range(2):
            link = await linked(server, client_end(tls, "files", SECRET))
            assert link.transport is not None
            seen.append(link.transport.get_extra_info("ssl_object").getpeercert()["serialNumber"])
            link.lose(LostError("over"))
            authority.issue("node")
        assert seen[0] != seen[1]


def test_an_unusable_renewal_leaves_the_earlier_certificate_in_use(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.issue("node")
    ends = server_ends(tls, SECRET)
    assert ends is not None
    before = ends().digest
    Path(tls.key).write_text("no key")
    assert ends().digest == before
    assert "the earlier certificate stays in use" in caplog.text
    authority.issue("node")
    assert ends().digest != before


def test_files_are_checked_before_a_start(authority: Authority, tmp_path: Path) -> None:
    check_files(authority.issue("good"))
    with pytest.raises(TlsError, match="has expired"):
        check_files(authority.issue("old", age=3 * DAY, rest=-timedelta(minutes=1)))
    with pytest.raises(TlsError, match="both serverAuth and clientAuth"):
        check_files(authority.issue("half", uses=(ExtendedKeyUsageOID.SERVER_AUTH,)))
    with pytest.raises(TlsError, match="not from the expected authority"):
        check_files(authority.issue("good")._replace(ca=str(Authority(tmp_path / "o").file)))
    with pytest.raises(TlsError, match=r"cannot be used \(No such file"):
        check_files(authority.issue("good")._replace(key=str(tmp_path / "missing.pem")))
    swapped = authority.issue("good")
    with pytest.raises(TlsError, match="cannot be used"):
        check_files(swapped._replace(key=authority.issue("other").key))


def test_a_reason_is_logged_once_a_minute_and_reasons_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    refusals = Refusals()
    for _ in range(3):
        refusals.log("a", "why")
    assert len(caplog.records) == 1
    now_s[0] += tls_module.REPEAT_S
    refusals.log("a", "why")
    assert len(caplog.records) == 2
    for number in range(100):
        refusals.log("a", f"why {number}")
    assert len(refusals._logged_s) == tls_module.MAX_REASONS


@pytest.mark.parametrize("router", [OFF, MADE], ids=["router without", "router with"])
@pytest.mark.parametrize("replica", [OFF, MADE], ids=["replica without", "replica with"])
async def test_during_a_rolling_update_routers_connect_to_old_and_new_replicas(
    replica: WireTls, router: WireTls, caplog: pytest.LogCaptureFixture
) -> None:
    async with Wired({"a": never}, {"echo": echo}, tls=replica, router_tls=router) as wired:
        assert await wired.links.call("a", "echo", b"x", within_s=10) == b"x"
        address = wired.links.address("a")
        assert address is not None
        assert address.tls == replica.mode
        assert wired.links.wire() == {"a": {"host": LOOPBACK, "tls": replica.mode}}
    is_warned = "is not encrypted, because the replica was started without" in caplog.text
    assert is_warned == (router.is_on and not replica.is_on)


async def test_a_router_without_a_certificate_names_the_options_that_it_lacks(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.issue("node")
    wired = Wired({"a": never}, tls=tls)
    await wired.servers["a"].start(LOOPBACK)
    running = asyncio.create_task(wired.links.run())
    await until(lambda: "no connection to replica a" in caplog.text)
    running.cancel()
    await asyncio.wait([running])
    await wired.servers["a"].close()
    assert "set --wire-tls-cert, --wire-tls-key and --wire-tls-ca here, too" in caplog.text


def test_a_start_with_one_file_or_an_expired_certificate_is_refused(authority: Authority) -> None:
    with pytest.raises(SettingsError, match="--wire-tls-key is missing"):
        load({"wire_tls": True, "wire_tls_cert": "cert.pem"})
    old = authority.issue("old", age=3 * DAY, rest=-DAY)
    files = {"wire_tls_cert": old.cert, "wire_tls_key": old.key, "wire_tls_ca": old.ca}
    with pytest.raises(StartError, match="has expired; renew"):
        check_wire_tls(load({"wire_tls": True, **files}))
    new = authority.issue("old")
    settings = load({"wire_tls": True, **files})
    check_wire_tls(settings)
    check_wire_tls(load({"wire_tls": True}))
    (model,) = settings.resolve(redis_url="redis://127.0.0.1")
    assert model.tls == new
