"""A block server and pulls from it: whatever goes wrong, only whole and right blocks arrive."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.replica.fabric import server as server_module
from kvroute.replica.fabric.protocol import CHALLENGE, PROOF, Row
from kvroute.replica.fabric.pull import LinkSpeed
from kvroute.replica.fabric.pull_speed import PullSpeed, measured
from kvroute.replica.fabric.puller import PullEnd, PullRun, Target
from kvroute.replica.fabric.server import MAX_PULLS, BlockPlace, BlockServer

ROW_BYTES, ROWS = 5_000, 12
KEY = b"key"
LONG_S, SHORT_S = 60.0, 0.3


class Peer:
    """A replica with blocks in host memory, and its block server."""

    def __init__(self, kind: type[BlockServer] = BlockServer, format_: str = "f") -> None:
        self.rows = np.random.default_rng(1).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)
        self.places = {_key(n): BlockPlace(object(), n) for n in range(ROWS)}
        self.server = kind(
            "127.0.0.1",
            [0],
            key=KEY,
            format_=format_,
            find=lambda key: self.places.get(key),
            rows=self.rows,
        )

    @property
    def address(self) -> str:
        return self.server.address


def _key(number: int) -> bytes:
    return number.to_bytes(36, "big")


@contextlib.contextmanager
def serving(kind: type[BlockServer] = BlockServer, format_: str = "f") -> Iterator[Peer]:
    peer = Peer(kind, format_)
    try:
        yield peer
    finally:
        peer.server.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving() as peer:
        yield peer


class Own:
    """The host memory of the replica that pulls, whose rows have the blocks' numbers."""

    def __init__(self) -> None:
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)

    def pull(
        self,
        address: str,
        *chains: range,
        key: bytes = KEY,
        format_: str = "f",
        within_s: float = LONG_S,
    ) -> PullEnd:
        targets = [[Target(_key(number), number) for number in chain] for chain in chains]
        run = PullRun(self.rows, targets or [[Target(_key(n), n) for n in range(ROWS)]])
        deadline_s = time.monotonic() + within_s
        return run.run(address, key=key, format_=format_, deadline_s=deadline_s)

    def check(self, peer: Peer, end: PullEnd) -> int:
        """Check that the blocks that arrived are the peer's, and return their number."""
        for key in end.arrived:
            number = int.from_bytes(key, "big")
            assert (self.rows[number] == peer.rows[number]).all()
        return len(end.arrived)


@pytest.fixture
def own() -> Own:
    return Own()


def test_all_blocks_arrive(peer: Peer, own: Own) -> None:
    end = own.pull(peer.address)
    assert (own.check(peer, end), end.reason) == (ROWS, "")


def test_a_chain_ends_at_the_first_block_that_is_missing(peer: Peer, own: Own) -> None:
    del peer.places[_key(3)]
    end = own.pull(peer.address, range(6), range(6, 9))
    assert end.arrived == [_key(n) for n in (0, 1, 2, 6, 7, 8)]
    assert (own.check(peer, end), end.reason) == (6, "gone")


def test_a_block_that_is_evicted_while_it_is_sent_does_not_arrive(own: Own) -> None:
    class Evicting(BlockServer):
        def _sent(self, row: Row) -> Row:
            evicting.places.pop(_key(4), None)
            return row

    with serving(Evicting) as evicting:
        end = own.pull(evicting.address, range(4, 8))
    assert (end.arrived, end.reason) == ([], "gone")


def test_a_block_that_left_and_came_back_does_not_arrive(own: Own) -> None:
    class Moving(BlockServer):
        def _sent(self, row: Row) -> Row:
            moving.places[_key(4)] = BlockPlace(object(), 4)
            return row

    with serving(Moving) as moving:
        assert own.pull(moving.address, range(4, 8)).arrived == []


@pytest.mark.parametrize("wrong", [{"key": b"other"}, {"format_": "g"}])
def test_another_key_or_format_is_refused(peer: Peer, own: Own, wrong: dict[str, object]) -> None:
    end = own.pull(peer.address, **wrong)  # type: ignore[arg-type]
    assert (end.arrived, end.reason) == ([], "refused")
    assert not own.rows.any()


def test_a_process_that_does_not_know_the_key_cannot_serve_blocks(own: Own) -> None:
    class Rogue(BlockServer):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options | {"key": b"unknown"})  # type: ignore[arg-type]

    with serving(Rogue) as peer:
        assert own.pull(peer.address).reason == "refused"


def test_a_wrong_bit_ends_the_pull(own: Own) -> None:
    class Noisy(BlockServer):
        count = 0

        def _sent(self, row: Row) -> Row:
            self.count += 1
            if self.count != 3:
                return row
            wrong = row.copy()
            wrong[100] ^= 1
            return wrong

    with serving(Noisy) as peer:
        end = own.pull(peer.address)
        assert (own.check(peer, end), end.reason) == (2, "damaged")


def test_a_peer_that_hangs_costs_no_more_than_the_limit(own: Own) -> None:
    go_on = threading.Event()

    class Frozen(BlockServer):
        def _sent(self, row: Row) -> Row:
            go_on.wait()
            return row

    with serving(Frozen) as peer:
        end = own.pull(peer.address, within_s=SHORT_S)
        go_on.set()
    assert (end.arrived, end.reason) == ([], "late")


def test_a_pull_can_be_aborted_from_another_thread(own: Own) -> None:
    go_on, has_begun = threading.Event(), threading.Event()

    class Frozen(BlockServer):
        def _sent(self, row: Row) -> Row:
            has_begun.set()
            go_on.wait()
            return row

    with serving(Frozen) as peer:
        run = PullRun(own.rows, [[Target(_key(0), 0)]])
        ends: list[PullEnd] = []
        deadline_s = time.monotonic() + LONG_S
        thread = threading.Thread(
            target=lambda: ends.append(
                run.run(peer.address, key=KEY, format_="f", deadline_s=deadline_s)
            )
        )
        thread.start()
        has_begun.wait()
        run.abort()
        thread.join()
        go_on.set()
    assert ends[0].reason == "off"
    late = PullRun(own.rows, [[]])
    late.abort()
    assert late.run(peer.address, key=KEY, format_="f", deadline_s=deadline_s).reason == "off"


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:x", "127.0.0.1:1", ":", "a:99999"])
def test_an_address_without_a_server_gives_nothing(own: Own, address: str) -> None:
    assert own.pull(address).reason in ("lost", "late")


def test_a_pull_without_time_connects_to_nobody(peer: Peer, own: Own) -> None:
    assert own.pull(peer.address, within_s=0.0).reason == "late"


def test_too_many_pulls_at_a_time_are_refused(own: Own) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    class Slow(BlockServer):
        def _sent(self, row: Row) -> Row:
            begun.release()
            go_on.wait()
            return row

    with serving(Slow) as peer:
        others = [Own() for _ in range(MAX_PULLS)]
        threads = [
            threading.Thread(target=each.pull, args=(peer.address, range(1))) for each in others
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            begun.acquire()
        refused = own.pull(peer.address)
        go_on.set()
        for thread in threads:
            thread.join()
        assert refused.reason == "refused"
        assert own.check(peer, own.pull(peer.address)) == ROWS


def test_silent_clients_keep_no_puller_out(peer: Peer, own: Own) -> None:
    host, port = peer.address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    assert own.check(peer, own.pull(peer.address)) == ROWS
    assert len(peer.server._peers) <= server_module.MAX_UNPROVEN
    for each in silent:
        each.close()


def test_a_puller_that_stops_reading_loses_its_place(
    peer: Peer, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_SERVED_S", SHORT_S)
    peer.server._rows = np.zeros((ROWS, 4_000_000), np.uint8)  # more than sockets buffer
    has_left = threading.Event()

    class Deaf(PullRun):
        def _receive_chain(self, *_: object) -> str:  # type: ignore[override]
            has_left.wait()
            return "late"

    def pull() -> None:
        deadline_s = time.monotonic() + LONG_S
        targets = [[Target(_key(n), n) for n in range(ROWS)]]
        Deaf(own.rows, targets).run(peer.address, key=KEY, format_="f", deadline_s=deadline_s)

    threads = [threading.Thread(target=pull) for _ in range(MAX_PULLS)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + LONG_S
    while peer.server._peers or time.monotonic() < deadline_s - LONG_S + SHORT_S:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    has_left.set()
    for thread in threads:
        thread.join()


def _raw(peer: Peer, data: Callable[[bytes], bytes]) -> None:
    """Send bytes that depend on the server's challenge, and read until the server hangs up."""
    host, port = peer.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=LONG_S) as raw:
        _, nonce = CHALLENGE.unpack(raw.recv(CHALLENGE.size, socket.MSG_WAITALL))
        with contextlib.suppress(OSError):
            raw.sendall(data(nonce))
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(1 << 16):
                pass


@given(st.binary(max_size=300))
def test_arbitrary_bytes_do_not_stop_the_server(data: bytes) -> None:
    from kvroute.wire.framed_connection import proof

    _raw(SHARED, lambda _: data)
    _raw(
        SHARED,
        lambda nonce: PROOF.pack(proof(KEY, b"puller", nonce), bytes(16), len(data)) + data,
    )
    own = Own()
    assert own.check(SHARED, own.pull(SHARED.address)) == ROWS


@given(st.integers(0, ROWS * (ROW_BYTES + 10) + 100), st.integers(0, 3_000))
def test_a_link_that_is_cut_anywhere_gives_only_whole_blocks(cut: int, piece: int) -> None:
    """A proxy forwards the first `cut` bytes of the peer's answer, in pieces."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=_forward, args=(proxy, SHARED.address, cut, piece + 1))
        thread.start()
        own = Own()
        end = own.pull(f"127.0.0.1:{proxy.getsockname()[1]}")
        thread.join()
    count = own.check(SHARED, end)
    assert (count == ROWS) == (end.reason == "")
    assert end.reason in ("", "lost", "refused")


def _forward(proxy: socket.socket, address: str, cut: int, piece: int) -> None:
    puller, _ = proxy.accept()
    host, port = address.rsplit(":", 1)
    with puller, socket.create_connection((host, int(port))) as peer:
        back = threading.Thread(target=_copy, args=(puller, peer, 1 << 40, 1 << 16))
        back.start()
        _copy(peer, puller, cut, piece)
        for each in (peer, puller):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        back.join()


def _copy(source: socket.socket, target: socket.socket, most: int, piece: int) -> None:
    with contextlib.suppress(OSError):
        while most and (data := source.recv(min(piece, most))):
            target.sendall(data)
            most -= len(data)


SHARED: Peer


@pytest.fixture(autouse=True, scope="module")
def _shared() -> Iterator[None]:
    """Hypothesis runs a test many times with one fixture."""
    global SHARED
    with serving() as SHARED:
        yield


def test_the_first_speed_is_measured() -> None:
    speed = measured("127.0.0.1", 100_000)
    assert speed.latency_s >= 0
    assert speed.bytes_per_s > 0


def test_the_speed_follows_the_pulls() -> None:
    speed = PullSpeed(LinkSpeed(0.01, 1e9))
    before = speed.current()
    for _ in range(30):
        speed.record(10**9, 2 * LinkSpeed(0.01, 1e9).seconds(10**9))
    assert speed.current().bytes_per_s == pytest.approx(before.bytes_per_s / 2, rel=0.1)
    assert speed.current().latency_s == pytest.approx(2 * before.latency_s, rel=0.1)
    speed.record(0, 1.0)
    assert speed.current().bytes_per_s == pytest.approx(before.bytes_per_s / 2, rel=0.1)
