"""The part of a model's router that calls features, when there are none."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from kvroute.router.api.calls import Call


class WithoutFeatures:
    """What HTTP routes use of ModelRouter, for models of tests."""

    cards: Sequence[Any] = ()

    async def look_for(self, model: str) -> None:
        """Look for a variant of the model; there is none."""

    def entered(self, call: Call, kept: ExitStack) -> Call:
        return call
