"""The gate before the HTTP routes: who sends a request, what may it use, and may it begin now?

The gate of the core is open: all clients are the same caller, which may use everything. A feature
can close it (`Feature.gate`). Then each request belongs to a tenant, and tenants share nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from kvroute.contract.priority import Priority
from kvroute.features.router_service import RouterService

if TYPE_CHECKING:
    from starlette.types import Scope

# What a caller may do. use: generate and embed. observe: read the metrics and the state of the
# cluster, which show every tenant's requests. manage: change what the cluster serves, and test it.
Role = Literal["use", "observe", "manage"]
ROLES: tuple[Role, ...] = get_args(Role)
TENANT = r"^[\w.@-]{1,64}\Z"  # pattern of a tenant's name

# Why a cluster with --api-keys does not start, if no feature closes the gate.
UNGUARDED = (
    "--api-keys is set, but this kvroute has no feature that checks API keys, so everyone could "
    "use the cluster; install all of kvroute on every node, or start it without --api-keys"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its tenant, and what the tenant may do. By default, it is anyone."""

    tenant: str = ""  # the tenant's name; empty: the gate is open, and there are no tenants
    roles: frozenset[str] = frozenset(ROLES)
    salt: str = ""  # cache salt of the tenant's prompts; replicas and Redis know this salt
    secret: str = ""  # salt of what the tenant stores in Redis; only routers know this salt
    # Most urgent priority class of its requests. If the gate is open, every class is allowed.
    priority: Priority = "default"
    # Name of a limit -> how many the tenant may have. What has no limit is missing.
    limits: Mapping[str, int] = field(default_factory=dict, hash=False)
    adapters: Collection[str] | None = None  # names of those that it may use; None: all

    def salted(self, cache_salt: str) -> str:
        """Return the salt that separates cached blocks: that of the tenant and of the request.

        Two tenants never get the same result.

        Args:
            cache_salt: the `cache_salt` of the request, which may be empty.
        """
        if not self.tenant:
            return cache_salt
        return f"{self.salt}.{cache_salt}" if cache_salt else self.salt

    def may_use(self, adapter: str) -> bool:
        """Return whether its requests may use this LoRA adapter."""
        return self.adapters is None or adapter in self.adapters


ANYONE = Caller()  # sends all requests if the gate is open


class Entry:
    """A request that the gate has let in, until its end. Each method has an empty default.

    Times are seconds of a monotonic clock. `add_prompt_tokens` and `admit` raise ApiError if the
    request may not go on now.
    """

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant  # name of the caller's tenant; empty: there are no tenants

    def add_prompt_tokens(self, prompt_tokens: int, now_s: float) -> None:
        """Count the tokens of all prompts of the request, before one is sent to a replica."""

    def admit(self, id_: str, prompt_tokens: int, uncached_tokens: int, now_s: float) -> None:
        """Count one prompt, before it is sent to a replica. It can be sent again.

        Args:
            id_: id of the prompt.
            uncached_tokens: estimate of the tokens that the replica has to compute.
        """

    def charge_computed(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        """At a prompt's first token, count the tokens that the replica has computed."""

    def refund(self, now_s: float) -> None:
        """Stop counting the prompts without a first token, since the request was refused."""

    def headers(self, now_s: float) -> Mapping[str, str]:
        """Return headers of the response, which tell the client how much it may still use."""
        return {}

    def leave(self) -> None:
        """Record that the request has ended."""


UNCOUNTED = Entry()  # any request for which the gate counts nothing


class Gate(RouterService):
    """Decides who may send requests to a router. By default, it is open."""

    is_open = True
    problem = ""  # why it does not know the latest changes of who may; empty: it knows them

    async def caller(self, scope: "Scope", roles: Sequence[Role]) -> Caller:
        """Return who sends the request of an ASGI scope.

        Args:
            roles: the caller needs one of them.

        Raises:
            ApiError: the caller is unknown, or has none of the roles.
        """
        return ANYONE

    def enter(self, caller: Caller, now_s: float) -> Entry:
        """Let a request begin.

        Raises:
            ApiError: the caller may not send a further request now.
        """
        return UNCOUNTED

    def sender(self, tenant: str, priority: Priority) -> Caller | None:
        """Return a tenant as the caller of requests that a router sends for it; None: unknown.

        Args:
            tenant: the tenant of the caller for whom the router has kept the requests.
            priority: the priority class of that caller.
        """
        return ANYONE

    def limits(self, tenant: str) -> Mapping[str, int]:
        """Return a tenant's limits, as in `Caller.limits`."""
        return {}


OPEN = Gate()
