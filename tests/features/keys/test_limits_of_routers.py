"""A tenant's requests count in the limits of all routers, as long as these are connected."""

from pathlib import Path

import msgspec

from kvroute.contract.messages import RouterMessage, decode, encode
from kvroute.contract.records import VERSION
from kvroute.features.keys.key_file import new_file, new_key, write
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.limits import TenantLimits
from kvroute.features.keys.router_keys import RouterKeys
from kvroute.features.keys.router_limits import Limits
from kvroute.router.connections.peers import CUT_OFF_S, SILENCE_S
from tests.support.peers import Router, connected
from tests.support.router_parts import fake_base
from tests.support.waiting import until


class Limited(Router):
    """A router whose tenant acme has a limit of one request."""

    def __init__(self, folder: Path, origin: str = "") -> None:
        _, entry = new_key("acme", ["use"], "")
        limits = {"acme": TenantLimits(max_requests=1)}
        path = folder / "keys.json"
        write(path, msgspec.structs.replace(new_file(), keys=(entry,), tenants=limits))
        gate = KeyGate(path)
        base = fake_base(gate=gate)
        super().__init__(origin, [RouterKeys(base)])
        self.limits: Limits = gate.counts


async def test_a_tenants_requests_count_on_all_routers(redis_url: str, tmp_path: Path) -> None:
    one, other = Limited(tmp_path), Limited(tmp_path)
    async with connected(redis_url, one, other):
        entry = one.limits.enter("acme", 0.0)
        assert entry
        await until(lambda: other.limits.in_flight("acme") == (1, 0))
        entry.add_prompt_tokens(5, 0.0)
        await until(lambda: other.limits.in_flight("acme") == (1, 5))
        entry.leave()
        await until(lambda: other.limits.in_flight("acme") == (0, 0))


async def test_the_tenants_requests_of_a_silent_router_end(redis_url: str, tmp_path: Path) -> None:
    one, other = Limited(tmp_path), Limited(tmp_path)
    async with connected(redis_url, one, other):
        one.limits.enter("acme", 0.0)
        await until(lambda: other.limits.in_flight("acme") == (1, 0))
    other.now_s += SILENCE_S - 1
    other.listener.receive(RouterMessage(VERSION, other.listener.own, []))  # it hears itself
    other.now_s += 2
    other.listener.forget_silent()
    assert (other.limits.in_flight("acme"), other.limits.shared_by) == ((0, 0), 1)


async def test_routers_that_are_cut_off_share_the_limits_until_they_are_connected_again(
    redis_url: str, tmp_path: Path
) -> None:
    one, other = Limited(tmp_path), Limited(tmp_path)
    async with connected(redis_url, one, other):
        await until(lambda: len(one.limits._others) == 1)
    one.now_s += CUT_OFF_S + 0.1
    one.listener.forget_silent()
    assert one.limits.shared_by == 2
    one.listener.forget_all()  # Redis refuses, again and again
    one.listener.forget_all()
    assert one.limits.shared_by == 2
    for _ in range(10):
        assert one.limits.shared_by == 2
        one.now_s += SILENCE_S / 8
        one.listener.receive(RouterMessage(VERSION, one.listener.own, []))
        one.listener.forget_silent()
        if one.limits.shared_by == 1:
            break
    assert one.limits.shared_by == 1


def test_tenants_are_the_same_in_another_ray_cluster(tmp_path: Path) -> None:
    """During an upgrade, two Ray clusters have the same id, and each has replicas of its own."""
    sender, receiver = Limited(tmp_path, "ray-1"), Limited(tmp_path, "ray-2")
    sender.limits.enter("acme", 100.0)
    receiver.listener.receive(sender.peer_publisher.next_message())
    assert receiver.limits.in_flight("acme") == (1, 0)


def test_routers_read_the_messages_of_those_that_sent_tenants_in_a_field_of_their_own() -> None:
    old = msgspec.msgpack.encode([VERSION, "r", [], [["acme", 1, 2, 3, 4]], True])
    assert decode(old).router == "r"
    assert msgspec.msgpack.decode(encode(RouterMessage(VERSION, "r", [])))[3:5] == [[], False]
