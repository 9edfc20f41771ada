"""Tells the engine which limit of the time between tokens a request has chosen."""

from contextlib import AbstractContextManager, nullcontext

from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.features.gaps import HEADER
from kvroute.features.gaps.gap_options import MAX_TPOT_MS
from kvroute.features.gaps.placed_gaps import PlacedGaps
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import invalid
from kvroute.router.placement.attempts import Attempt


class RouterGaps(PlacedGaps, RouterFeature):
    """Tells engines which limit a request has chosen. Batch requests have none."""

    def with_data(self, call: Call) -> AbstractContextManager[Call]:
        if (value := call.headers.get(HEADER)) is None:
            return nullcontext(call)
        is_short_number = value.isdecimal() and value.isascii() and len(value) <= 5
        if not is_short_number or int(value) > MAX_TPOT_MS:
            raise invalid(
                HEADER,
                f"{HEADER} is {value[:40]!r}; expected the most milliseconds between two tokens, "
                f"from 1 to {MAX_TPOT_MS}, or 0 for no limit",
            )
        data = str(int(value)).encode()
        return nullcontext(replace(call, features={**call.features, self.name: data}))

    def sending(self, request: GenerateRequest, attempt: Attempt) -> GenerateRequest:
        if not request.is_batch:
            return request
        return replace(request, features={**(request.features or {}), self.name: b"0"})
