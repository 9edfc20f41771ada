"""The entry of a feature: what it is called, its options, and how its side in a router is built.

A feature is a folder of this package, with an instance of a subclass of `Feature` in its
`__init__.py`. Every process and every command imports that module, so it imports the rest of its
folder only inside its methods.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvroute.contract.error_codes import FeatureCode

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvroute.doctor.checks import Check
    from kvroute.features.placing_feature import PlacingFeature
    from kvroute.features.router_feature import RouterFeature
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need

State = Mapping[str, Any]  # what RouterFeature.state returns, and the name of the model


class RefusalText(NamedTuple):
    """What operators read about requests that were refused for a reason of a feature."""

    metric: str  # why, as in "(the wait was above the limit)" in the description of the metric
    finding: str  # follows a number of requests, such as "waited too long for a seat"
    option: str  # the option with a larger value of which fewer are refused


class Feature:
    """One feature of kvroute. Every method has an empty default."""

    name = ""  # the name of its folder, which is also the key of its data and its states
    refusals: ClassVar[Mapping[str, RefusalText]] = {}  # by the reason that metrics have as label
    codes: Sequence[FeatureCode] = ()  # of its errors, besides those of the core
    has_state = False  # whether GET /v1/cluster and the doctor get a list of its states, by model

    # Its options, each of which has a description as in kvroute/settings/options.

    def router_options(self) -> "type[BaseModel] | None":
        """Return the class of the options that routers receive."""
        return None

    def needs(self) -> "Sequence[Need]":
        """Return which of its options have no effect without another option."""
        return ()

    # Its sides in the processes.

    def router(self, base: "RouterBase") -> "RouterFeature | None":
        """Return its side in the router of one model; None: it is off."""
        return None

    def replayed(self) -> "PlacingFeature | None":
        """Return its side in a router of a replay, which has a clock of its own and no Redis."""
        return None

    # What operators see.

    def lines(self, state: State) -> Iterable[tuple[str, str]]:
        """Return lines for `kvroute status`, each with a heading, about one model."""
        return ()

    def checks(self, states: Sequence[State]) -> "Iterator[Check]":
        """Check the states of all models, for `kvroute doctor`."""
        yield from ()
