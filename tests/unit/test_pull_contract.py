"""Tests of the messages about pulls (contract/pull.py)."""

import math

import numpy as np
import pytest

from kvroute.contract.generation import Chunk, GenerateRequest, joined
from kvroute.contract.pull import MAX_WITHIN_S, Pull, PullResult, pull_key
from kvroute.wire.structs import decode_begin, encode_begin

PULL = Pull("peer-0", "10.0.0.2:7070", pull_key(b"secret"), tokens=512, within_s=0.5)


def sent(pull: Pull | None) -> GenerateRequest:
    request = GenerateRequest("r", np.arange(600, dtype=np.uint32), pull=pull, pin="own")
    return decode_begin(encode_begin(1, request))[1]


def test_a_pull_reaches_the_replica_with_the_request() -> None:
    assert sent(PULL).pull == PULL
    assert sent(None).pull is None


@pytest.mark.parametrize(
    ("within_s", "limited"), [(math.inf, 0.0), (math.nan, 0.0), (1e8, MAX_WITHIN_S), (0.25, 0.25)]
)
def test_the_time_of_a_pull_is_limited(within_s: float, limited: float) -> None:
    assert Pull("a", "b:1", b"", 1, within_s).limited().within_s == limited


def test_joined_chunks_keep_the_result_of_the_pull() -> None:
    result = PullResult(512, 1 << 20, 0.1)
    chunks = [Chunk((1,), 0, pulled=result), Chunk((2,), 0), Chunk((3,), 0)]
    assert joined(chunks).pulled == result
    assert joined(chunks[1:]).pulled is None


def test_the_key_for_pulls_is_not_the_secret() -> None:
    assert pull_key(b"secret") not in (b"secret", pull_key(b"other"))
