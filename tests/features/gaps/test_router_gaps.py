"""What a router tells engines about the limits of requests."""

from typing import Any, cast

import pytest

from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.features.gaps import HEADER
from kvroute.features.gaps.router_gaps import RouterGaps
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import Attempt

NO_ATTEMPT = cast("Attempt", None)  # it is not used


def data_of(headers: dict[str, str]) -> Any:
    call = Call("/v1/chat/completions", b"{}", {}, headers=headers, features={"other": b"1"})
    with RouterGaps().with_data(call) as found:
        assert found.features["other"] == b"1"
        return found.features.get("gaps")


def test_a_header_is_passed_to_the_engine() -> None:
    assert data_of({}) is None
    assert data_of({HEADER: "20"}) == b"20"
    assert data_of({HEADER: "0"}) == b"0"


@pytest.mark.parametrize("value", ["", "-1", "20.5", "fast", "60001", "9" * 5000, "٢٠"])
def test_another_value_is_refused_with_the_limits(value: str) -> None:
    with pytest.raises(ApiError, match="from 1 to 60000") as refused:
        data_of({HEADER: value})
    assert refused.value.status == 400
    assert len(str(refused.value)) < 200


def test_batch_requests_have_no_limit() -> None:
    sending = RouterGaps().sending
    usual = GenerateRequest("a", NO_TOKENS, features={"other": b"1"})
    assert sending(usual, NO_ATTEMPT) is usual
    batch = GenerateRequest("b", NO_TOKENS, is_batch=True, features={"gaps": b"20"})
    assert sending(batch, NO_ATTEMPT).features == {"gaps": b"0"}
