"""Tells the engine which limit of the time between tokens a request has chosen."""

from contextlib import AbstractContextManager, nullcontext

from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.features.gaps.placed_gaps import PlacedGaps
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import invalid
from kvroute.router.placement.attempts import Attempt

HEADER = "x-kvroute-tpot-ms"
MAX_MS = 60_000  # highest limit that a request can choose


class RouterGaps(PlacedGaps, RouterFeature):
    """Tells engines which limit a request has chosen. Batch requests have none."""

    def with_data(self, call: Call) -> AbstractContextManager[Call]:
        if (value := call.headers.get(HEADER)) is None:
            return nullcontext(call)
        if not (value.isdecimal() and value.isascii() and len(value) <= 5 and int(value) <= MAX_MS):
            raise invalid(
                HEADER,
                f"{HEADER} is {value[:40]!r}; expected the most milliseconds between two tokens, "
                f"from 1 to {MAX_MS}, or 0 for no limit",
            )
        data = str(int(value)).encode()
        return nullcontext(replace(call, features={**call.features, self.name: data}))

    def sending(self, request: GenerateRequest, attempt: Attempt) -> GenerateRequest:
        if not request.is_batch:
            return request
        return replace(request, features={**(request.features or {}), self.name: b"0"})
