"""A closed gate, for tests of what is behind it."""

from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from kvroute.contract.priority import Priority
from kvroute.features.gate import ANYONE, Caller, Entry, Gate, Role
from kvroute.router.api.errors import ApiError


class OpenEntry(Entry):
    """A request that adds itself to a list of running requests."""

    def __init__(self, running: list[Entry]) -> None:
        self._running = running
        running.append(self)

    def leave(self) -> None:
        self._running.remove(self)


class ClosedGate(Gate):
    """A gate that knows some callers. The key of each is its tenant's name, in x-api-key."""

    is_open = False

    def __init__(self, *callers: Caller) -> None:
        self.entries: list[Entry] = []
        self._callers = {caller.tenant: caller for caller in callers}

    async def caller(self, scope: Scope, roles: Sequence[Role]) -> Caller:
        caller = self._callers.get(Headers(scope=scope).get("x-api-key", ""))
        if caller is None or caller.roles.isdisjoint(roles):
            raise ApiError(401, "unknown")
        return caller

    def enter(self, caller: Caller, now_s: float) -> Entry:
        return OpenEntry(self.entries)

    def sender(self, tenant: str, priority: Priority) -> Caller | None:
        return self._callers.get(tenant)

    def limits(self, tenant: str) -> Mapping[str, int]:
        return self._callers.get(tenant, ANYONE).limits
