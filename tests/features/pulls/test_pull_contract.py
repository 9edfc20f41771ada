"""Tests of the messages about pulls (fabric/pull.py)."""

import math

import numpy as np
import pytest

from kvroute.contract.generation import Chunk, GenerateRequest, joined
from kvroute.replica.fabric.pull import FEATURE, Pull, PullResult, carried, carried_in, pull_key
from kvroute.wire.structs import decode_begin, encode_begin

PULL = Pull("peer-0", "10.0.0.2:7070", pull_key(b"secret"), tokens=512, within_s=0.5)


def received(features: dict[str, bytes]) -> Pull | None:
    """Return the pull of a request that a router has sent with these `features`."""
    ids = np.arange(600, dtype=np.uint32)
    request = GenerateRequest("r", ids, features=features, pin="own")
    return carried_in(decode_begin(encode_begin(1, request))[1].features, Pull)


def test_a_pull_reaches_the_replica_with_the_request() -> None:
    assert received(carried(PULL)) == PULL
    assert received({}) is None


@pytest.mark.parametrize("within_s", [math.inf, math.nan, 1e8, -1.0])
def test_a_pull_without_a_usable_time_is_ignored(within_s: float) -> None:
    assert received(carried(Pull("a", "b:1", b"", 1, within_s))) is None


def test_data_that_cannot_be_read_is_ignored() -> None:
    assert received({FEATURE: b"\xc1", "other": b""}) is None


def test_joined_chunks_keep_the_result_of_the_pull() -> None:
    result = PullResult(512, 1 << 20, 0.1)
    chunks = [Chunk((1,), 0, features=carried(result)), Chunk((2,), 0), Chunk((3,), 0)]
    assert carried_in(joined(chunks).features, PullResult) == result
    assert joined(chunks[1:]).features is None


def test_the_key_for_pulls_is_not_the_secret() -> None:
    assert pull_key(b"secret") not in (b"secret", pull_key(b"other"))
