"""What surrounds a request in a replica, if the request has data for features."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.features.replica_feature import ReplicaFeature, ReplicaFeatures
from tests.support.answers import completion


class Preparing(ReplicaFeature):
    """A feature that records the data of the requests that run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[bytes] = []

    @asynccontextmanager
    async def around(self, request: GenerateRequest, data: bytes) -> AsyncIterator[None]:
        self.running.append(data)
        yield
        self.running.remove(data)


class Renaming(ReplicaFeature):
    """A feature that gives requests another id."""

    name = "renaming"

    @asynccontextmanager
    async def around(self, request: GenerateRequest, data: bytes) -> AsyncIterator[GenerateRequest]:
        yield replace(request, request_id=data.decode())


class Idle(ReplicaFeature):
    """A feature that needs nothing of requests."""

    name = "idle"


def request(**data: bytes) -> GenerateRequest:
    return GenerateRequest("r-0", NO_TOKENS, call=replace(completion(max_tokens=1), features=data))


async def test_a_request_runs_inside_the_features_for_which_it_has_data() -> None:
    one, other = Preparing("one"), Preparing("other")
    features = ReplicaFeatures([one, Idle(), Renaming(), other])
    given = request(one=b"1", unknown=b"?", idle=b"!", renaming=b"new")
    async with features.around(given) as run:
        assert (one.running, other.running) == ([b"1"], [])
        assert run == replace(given, request_id="new")
    assert not one.running


async def test_a_request_enters_features_in_the_order_of_their_list() -> None:
    names = [f"n{number}" for number in range(9)]
    entered: list[str] = []

    class Noting(Preparing):
        @asynccontextmanager
        async def around(self, request: GenerateRequest, data: bytes) -> AsyncIterator[None]:
            entered.append(self.name)
            yield

    features = ReplicaFeatures(map(Noting, names))
    async with features.around(request(**dict.fromkeys(reversed(names), b"1"))):
        assert entered == names


async def test_a_request_without_data_enters_no_feature() -> None:
    one = Preparing("one")
    async with ReplicaFeatures([one]).around(request()):
        assert not one.running
