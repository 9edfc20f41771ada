"""What the features of a router share with other routers."""

from typing import Any

import msgspec

from kvroute.contract.messages import RouterMessage, decode, encode
from kvroute.contract.records import VERSION
from kvroute.features.placing_feature import PlacingFeature, PlacingFeatures


class Sharing(PlacingFeature):
    """A feature that shares a number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received: list[int | None] = []

    def share(self, now_s: float) -> bytes | None:
        return msgspec.msgpack.encode(int(now_s))

    def receive(self, router: str, data: bytes | None, now_s: float) -> None:
        self.received.append(msgspec.msgpack.decode(data, type=int) if data else None)


class PreviousMessage(msgspec.Struct, array_like=True):
    """The message as routers read it that have no field for data of features."""

    version: int
    router: str
    events: list[Any]
    tenants: list[Any]
    is_complete: bool
    waiting: Any
    sessions: tuple[int, float]
    scale: Any
    origin: str


def test_an_unreadable_message_of_a_feature_costs_only_its_own_data() -> None:
    one, other, unreadable = Sharing("one"), Sharing("other"), list[str]()
    features = PlacingFeatures([one, other], lambda name, error: unreadable.append(name))
    message = RouterMessage(VERSION, "r", [], features=features.share(7.0) | {"one": b"\xc1"})
    features.receive("r", decode(encode(message)).features, 8.0)
    assert (one.received, other.received, unreadable) == ([], [7], ["one"])


def test_what_no_feature_knows_is_ignored_and_what_is_missing_is_nothing() -> None:
    known = Sharing("known")
    PlacingFeatures([known]).receive("r", {"unknown": b"?"}, 8.0)
    assert known.received == [None]


def test_routers_with_and_without_data_of_features_read_each_others_messages() -> None:
    message = RouterMessage(VERSION, "r", [], origin="here", features={"one": b"data"})
    read = msgspec.msgpack.decode(encode(message), type=PreviousMessage)
    assert (read.router, read.sessions, read.origin) == ("r", (0, 0.0), "here")
    previous = PreviousMessage(VERSION, "r", [], [], False, None, (3, 2.5), None, "here")
    sent = decode(msgspec.msgpack.encode(previous))
    assert (sent.origin, sent.features) == ("here", {})
