"""The entry of a feature: its name, options, routes and commands, and how its sides are built.

A feature is a folder of this package, with an instance of a subclass of `Feature` in its
`__init__.py`. Every process and every command imports that module, so it imports the rest of its
folder only inside its methods.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvroute.contract.error_codes import FeatureCode
from kvroute.contract.unreadable import FeatureKind

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.doctor.checks import Check
    from kvroute.features.engine_feature import EngineFeature
    from kvroute.features.gate import Gate
    from kvroute.features.placing_feature import PlacingFeature
    from kvroute.features.replica_feature import ReplicaBase, ReplicaFeature
    from kvroute.features.router_feature import RouterFeature
    from kvroute.features.router_service import RouterService
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need
    from kvroute.settings.router import RouterSettings

# Gets the settings of `kvroute serve` (ServeSettings, with the options of features), and raises
# StartError.
CheckOptions = Callable[[Any], object]
State = Mapping[str, Any]  # what RouterFeature.state returns, and the name of the model


class RefusalText(NamedTuple):
    """What operators read about requests that were refused for a reason of a feature."""

    metric: str  # why, as in "(the wait was above the limit)" in the description of the metric
    finding: str  # follows a number of requests, such as "waited too long for a seat"
    option: str  # the option with a larger value of which fewer are refused


class TermText(NamedTuple):
    """What operators read about a term that a feature adds to the cost of replicas."""

    label: str  # what the time is spent on, such as "copies from slower memory"
    # Why a replica was chosen ("it") instead of another one ({other}), which needs {seconds} more.
    reason: str
    # A sentence for `kvroute explain` about a chosen replica {id} with this term, which takes
    # {seconds}, and gets {tokens} from the replica {source}.
    chosen: str = ""


class Paths(NamedTuple):
    """What the router has to know about the paths of HTTP routes before it finds their route.

    `everybody`, `use`, `observe`, `read` and `manage` say which role a caller needs (gate.py). Each
    path in them stands for the paths below it, too. A path in none of them needs the role manage.
    """

    everybody: Sequence[str] = ()  # no role
    use: Sequence[str] = ()  # the role use
    observe: Sequence[str] = ()  # the role observe
    read: Sequence[str] = ()  # the role observe for GET, and the role manage for other methods
    manage: Sequence[str] = ()  # the role manage, if the path is below one of another role
    forms: Sequence[str] = ()  # bodies are multipart/form-data, which other routes refuse
    repeated: Sequence[str] = ()  # POST changes nothing, so that a request may run twice

    @classmethod
    def joined(cls, all_: "Iterable[Paths]") -> "Paths":
        """Return the paths of several features together."""
        return cls(*(tuple(chain.from_iterable(kind)) for kind in zip(*all_, strict=True)))


class DoctorRequest(NamedTuple):
    """A request with which `kvroute doctor` tests a cluster that has replicas."""

    name: str  # the name of the check that fails if the response is an error
    step: str  # what the doctor does meanwhile, such as "comparing all counts of blocks"
    method: str
    path: str
    checks: "Callable[[Mapping[str, Any]], Iterable[Check]]"  # gets the body of the response
    # The text of the option --NAME, without which the doctor does not send it. Empty: there is no
    # option, and the doctor always sends it.
    help: str = ""


class FeatureSettings(NamedTuple):
    """What the sides of a feature get of the options of one model, as JSON data."""

    routers: Mapping[str, Any] = {}
    replicas: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}  # variables of vLLM's processes, unless they are set


class Feature:
    """One feature of kvroute. Every method has an empty default."""

    name = ""  # the name of its folder, which is also the key of its data and its states
    refusals: ClassVar[Mapping[str, RefusalText]] = {}  # by the reason that metrics have as label
    codes: Sequence[FeatureCode] = ()  # codes of its errors, besides those of the core
    # Kind of its records in Redis that could not be read -> what operators can do.
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {}
    # Cause of cache misses in the ledger (router/placement/ledger.py) -> what operators can do.
    misses: ClassVar[Mapping[str, str]] = {}
    # Name of a term that it adds to the cost of replicas -> its words.
    terms: ClassVar[Mapping[str, TermText]] = {}
    # Its policies in a replay, without "kvroute-": there it does something else than in a router.
    policies: Sequence[str] = ()
    headers: Sequence[str] = ()  # request headers that Call.headers keeps for it
    fields: Sequence[str] = ()  # fields of request bodies that it reads, and that the core does not
    # Path of a route -> fields of its bodies with which a request must not run twice, for example
    # since its effects stay. The core may refuse such a field where no feature has it.
    once: ClassVar[Mapping[str, Sequence[str]]] = {}
    doctor_requests: Sequence[DoctorRequest] = ()  # requests with which `kvroute doctor` tests it
    # Whether GET /v1/cluster and `checks` get a list of its states, by model. If not, `checks` gets
    # the facts of its service.
    has_state = False
    paths = Paths()  # what is known of its routes

    # Headings of its options in --help-all, besides those of kvroute/settings/options/common.py.
    groups: Sequence[str] = ()

    # Its options, each of which has a description as in kvroute/settings/options.

    def options(self) -> "type[BaseModel] | None":
        """Return the class of its options."""
        return None

    def settings(self, options: Any) -> FeatureSettings:
        """Return what its sides get; by default, routers get all of its options.

        Args:
            options: an object with all options of one model.

        Raises:
            SettingsError: its options contradict each other, or name a file that cannot be used.
        """
        kind = self.options()
        names = kind.model_fields if kind else ()
        return FeatureSettings({name: getattr(options, name) for name in names})

    def needs(self) -> "Sequence[Need]":
        """Return which of its options have no effect without another option."""
        return ()

    def before_start(self) -> "Mapping[str, CheckOptions]":
        """Return checks of its options before `kvroute serve` starts anything, by name."""
        return {}

    def first_steps(self, options: Any, url: str) -> Iterable[str]:
        """Return lines for the user to read when a cluster has started at this address."""
        return ()

    # Its sides in the processes.

    def router(self, base: "RouterBase") -> "RouterFeature | None":
        """Return its side in the router of one model; None: it is off."""
        return None

    def gate(self, settings: "RouterSettings") -> "Gate | None":
        """Return the gate of a router, which this feature closes; None: it closes none.

        This runs in a thread, so it may wait for a disk.

        Args:
            settings: those of the first model, which are the cluster's where models cannot differ.
        """
        return None

    def service(self, base: "RouterBase") -> "RouterService | None":
        """Return what a router has once for all of its models; None: it is off.

        This runs in a thread, so it may wait for a disk.

        Args:
            base: that of the first model.
        """
        return None

    def replica(self, base: "ReplicaBase") -> "ReplicaFeature | None":
        """Return its side in a replica; None: it is off."""
        return None

    def engine(self, environment: Mapping[str, str]) -> "EngineFeature | None":
        """Return its side in the process of an engine; None: it is off.

        Args:
            environment: the process's variables, with those of FeatureSettings.environment.
        """
        return None

    def replayed(self, policy: str = "") -> "PlacingFeature | None":
        """Return its side in a router of a replay, which has a clock of its own and no Redis.

        Args:
            policy: one of `policies`; empty: what it does in a router.
        """
        return None

    # What clients and operators use.

    def routes(self) -> "Sequence[APIRouter]":
        """Return its HTTP routes, which every router has, also if the feature is off."""
        return ()

    def commands(self) -> "Mapping[str, typer.Typer | Callable[..., None]]":
        """Return groups of commands by name, and functions that are commands: `kvroute NAME ...`.

        If the core has a group of this name, the commands are added to it. A single command is for
        those who watch a cluster.
        """
        return {}

    # What operators see.

    def lines(self, state: State) -> Iterable[tuple[str, str]]:
        """Return lines for `kvroute status`, each with a heading, about one model."""
        return ()

    def checks(self, found: Any) -> "Iterator[Check]":
        """Check what a router knows of it, for `kvroute doctor`.

        Args:
            found: the list of its states, by model, if it has states; otherwise what
                RouterService.facts has returned. None: the router has none of it.
        """
        yield from ()
