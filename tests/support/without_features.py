"""The part of a model's router that calls features, when there are none."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from kvroute.router.api.calls import Call


class WithoutFeatures:
    """What HTTP routes use of ModelRouter, for models of tests."""

    cards: Sequence[Any] = ()
    promises: Sequence[Any] = ()
    extending: ClassVar[Mapping[str, Any]] = {}

    async def look_for(self, model: str) -> None:
        """Look for a variant of the model; there is none."""

    def with_data(self, call: Call, kept: ExitStack) -> Call:
        return call
