"""The limits of tenants: what each tenant has in flight on all routers, and how much it may add.

This module only computes: it uses no clock and no socket. A router knows its own requests at once,
and those of other routers as of their last reports. So all routers together may exceed a limit by
the requests that were admitted since these reports. A router that is cut off from the others
enforces only its share of each limit. Times come from a monotonic clock.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvroute.contract.messages import TenantCounts
from kvroute.contract.records import MAX_COUNT
from kvroute.keys.limits import TenantLimits

MINUTE_S = 60.0
AGAIN_S = 1.0  # `retry-after` in seconds when nobody can tell when a running request will end
# Least seconds between two complete reports. It is shorter than peers.ALIVE_S, so that each
# heartbeat has a complete report.
COMPLETE_S = 0.9
BUSY_TENANTS = 10_000  # most tenants that are counted for one other router

# Other routers' reports can raise a tenant's debt to the tokens of so many minutes at most.
MAX_TOLD_MINUTES = 10

NO_LIMITS = TenantLimits()

Limit = Literal["requests", "prompt_tokens", "uncached_tokens"]


@dataclass(eq=False)
class OverLimitError(Exception):
    """A request would exceed a limit of its tenant."""

    tenant: str
    limit: Limit
    most: int  # the limit in the key file
    asked: int  # amount that the request would add
    wait_s: float  # seconds until the request may be admitted; inf: it is too large for the limit
    shared_by: int = 1  # routers that are cut off from each other; each enforces a share of `most`


@dataclass(frozen=True, slots=True)
class Headroom:
    """A tenant's limits, what is left of them, and the estimated seconds until all is free again.

    A limit that is None is not set.
    """

    requests: int | None
    requests_left: int
    requests_reset_s: float
    tokens: int | None  # limit of uncached tokens a minute; if not set, of prompt tokens in flight
    tokens_left: int
    tokens_reset_s: float


@dataclass(slots=True)
class Usage:
    """What one tenant uses in this router. Only `debt` includes the other routers' requests."""

    requests: int = 0  # requests in flight
    prompt_tokens: int = 0  # prompt tokens of these requests
    spent: int = 0  # uncached tokens since the usage was first counted
    debt: float = 0.0  # uncached tokens that were spent and not yet regained, as of `at_s`
    at_s: float = 0.0  # time for which `debt` was computed


class Limits:
    """The limits of all tenants in one router, for all its models.

    Args:
        limits_of: returns the current limits of a tenant.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits | None]) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._limits_of = limits_of
        self._usages: dict[str, Usage] = {}  # tenant with limits -> its usage, while there is any
        self._others: dict[str, dict[str, TenantCounts]] = {}  # router -> tenant -> its counts
        self._changed = set[str]()  # tenants whose counts changed since the last report
        self._complete_s = -math.inf  # time of the last complete report
        self._shared_by = 1

    # This router's requests.

    def enter(self, tenant: str, now_s: float) -> "Entry | None":
        """Count a request of the tenant as in flight until `leave`.

        Returns:
            None if the tenant has no limits.

        Raises:
            OverLimitError: the tenant has too many requests in flight.
        """
        limits = self._limits_of(tenant)
        if limits is None or not limits.are_counted:
            return None
        under_way, _ = self.under_way(tenant)
        if limits.max_requests is not None and under_way >= self._share(limits.max_requests):
            raise self._refusal(tenant, "requests", limits.max_requests, 1, AGAIN_S)
        usage = self._usage(tenant, now_s)
        usage.requests += 1
        self.note(tenant)
        return Entry(self, tenant, usage)

    def check_prompt(self, tenant: str, prompt_tokens: int) -> None:
        """Check that the tenant may have so many more prompt tokens in flight.

        Raises:
            OverLimitError: the tenant would have too many prompt tokens in flight.
        """
        limits = self._limits_of(tenant) or NO_LIMITS
        most = limits.max_prompt_tokens
        if most is None:
            return
        _, under_way = self.under_way(tenant)
        # A request that is alone may exceed this router's share of the limit.
        is_alone = under_way == 0 and prompt_tokens <= most
        if under_way + prompt_tokens > self._share(most) and not is_alone:
            wait_s = AGAIN_S if prompt_tokens <= most else math.inf
            raise self._refusal(tenant, "prompt_tokens", most, prompt_tokens, wait_s)

    def check_minute(self, tenant: str, uncached_tokens: int, now_s: float) -> None:
        """Check that the tenant's minute has room for these uncached tokens.

        A request with more than half a minute's tokens needs only half of them left; otherwise it
        would never be admitted beside the tenant's small requests. The rest is charged later.

        Raises:
            OverLimitError: the minute has no room.
        """
        limits = self._limits_of(tenant) or NO_LIMITS
        most = limits.uncached_tokens_per_minute
        if most is None:
            return
        share = self._share(most)
        missing = min(uncached_tokens, share / 2) - (share - self._debt(tenant, now_s))
        if missing > 0:
            wait_s = missing * MINUTE_S / share
            raise self._refusal(tenant, "uncached_tokens", most, uncached_tokens, wait_s)

    def charge(self, tenant: str, uncached_tokens: int, now_s: float) -> None:
        """Record that the tenant spent uncached tokens; a negative number takes a charge back."""
        usage = self._usage(tenant, now_s)
        usage.debt = max(0.0, usage.debt + uncached_tokens)
        usage.spent = max(0, usage.spent + uncached_tokens)
        self.note(tenant)

    def note(self, tenant: str) -> None:
        """Mark the tenant's counts as changed, so that the next report has them."""
        self._changed.add(tenant)
        self.on_change()

    def under_way(self, tenant: str) -> tuple[int, int]:
        """Return the tenant's requests in flight, and their prompt tokens, on all known routers."""
        usage = self._usages.get(tenant)
        requests, tokens = (usage.requests, usage.prompt_tokens) if usage else (0, 0)
        if self._shared_by > 1:
            return requests, tokens
        for reported in self._others.values():
            if there := reported.get(tenant):
                requests, tokens = requests + there.requests, tokens + there.prompt_tokens
        return requests, tokens

    def room(self, tenant: str, now_s: float) -> Headroom:
        limits = self._limits_of(tenant) or NO_LIMITS
        requests, tokens = self.under_way(tenant)
        most = self._share(limits.max_requests or 0)
        each_minute, under_way = limits.uncached_tokens_per_minute, limits.max_prompt_tokens
        if each_minute is None:
            left, reset_s = self._share(under_way or 0) - tokens, AGAIN_S if tokens else 0.0
        else:
            debt = self._debt(tenant, now_s)
            left = int(self._share(each_minute) - debt)
            reset_s = debt * MINUTE_S / self._share(each_minute)
        return Headroom(
            limits.max_requests,
            max(0, most - requests),
            AGAIN_S if requests else 0.0,
            each_minute or under_way,
            max(0, left),
            reset_s,
        )

    # The other routers.

    @property
    def shared_by(self) -> int:
        """Return among how many routers the limits are divided; 1: the routers are connected."""
        return self._shared_by

    def report(self, now_s: float) -> tuple[list[TenantCounts], bool]:
        """Return the counts to publish, and whether they are complete.

        A tenant that is missing from a complete report has nothing in flight.
        """
        is_complete = now_s - self._complete_s >= COMPLETE_S
        if is_complete:
            self._complete_s = now_s
            self._forget_idle(now_s)
            self._changed = set(self._usages)
        tenants, self._changed = self._changed, set()
        return [self._counts(tenant, now_s) for tenant in tenants], is_complete

    def unsent(self) -> None:
        """Make the next report a complete one, because a report was lost."""
        self._complete_s = -math.inf

    def receive(
        self, router: str, counts: Iterable[TenantCounts], *, is_complete: bool, now_s: float
    ) -> None:
        """Take over another router's report.

        The reports of a new router are ignored until a complete one comes.
        """
        before = self._others.get(router)
        if before is None and not is_complete:
            return
        known = before if before and not is_complete else dict[str, TenantCounts]()
        reported = {count.tenant: count for count in counts}
        room = BUSY_TENANTS - len(known)
        new = [*islice((tenant for tenant in reported if tenant not in known), room)]
        reported = {
            tenant: reported[tenant] for tenant in [*new, *(reported.keys() & known.keys())]
        }
        for tenant, each in reported.items():
            last = before.get(tenant) if before else None
            self._charge_other(each, last, before is None, now_s)
        known.update(reported)
        self._others[router] = known

    def forget(self, router: str) -> None:
        """Drop the counts of a router that is gone."""
        self._others.pop(router, None)

    def cut_off(self, now_s: float) -> None:
        """Enforce only this router's share of each limit until `rejoin`.

        Called when no messages of other routers come.
        """
        self._divide(max(self._shared_by, 1 + len(self._others)), now_s)

    def rejoin(self, now_s: float) -> None:
        """Enforce the whole limits again, because all routers report again."""
        self._divide(1, now_s)

    def _divide(self, routers: int, now_s: float) -> None:
        if routers == self._shared_by:
            return
        for tenant, usage in self._usages.items():
            usage.debt = self._debt(tenant, now_s) * self._shared_by / routers
            usage.at_s = now_s
        self._shared_by = routers
        self.unsent()

    def _charge_other(
        self, reported: TenantCounts, before: TenantCounts | None, is_first: bool, now_s: float
    ) -> None:
        limits = self._limits_of(reported.tenant)
        each_minute = limits and limits.uncached_tokens_per_minute
        if self._shared_by > 1 or not each_minute:
            return
        spent = reported.spent - (before.spent if before else 0)
        if not (spent or is_first):
            return
        usage = self._usage(reported.tenant, now_s)
        debt = max(usage.debt, reported.debt) if is_first else usage.debt + spent
        usage.debt = min(max(0.0, debt), max(usage.debt, MAX_TOLD_MINUTES * each_minute))

    def _counts(self, tenant: str, now_s: float) -> TenantCounts:
        usage = self._usages.get(tenant) or Usage()
        debt = int(self._debt(tenant, now_s))
        counts = (usage.requests, usage.prompt_tokens, usage.spent, debt)
        return TenantCounts(tenant, *(min(count, MAX_COUNT) for count in counts))

    def _forget_idle(self, now_s: float) -> None:
        for tenant in [*self._usages]:
            if not self._usages[tenant].requests and not self._debt(tenant, now_s):
                del self._usages[tenant]

    # One tenant.

    def _usage(self, tenant: str, now_s: float) -> Usage:
        """Return the tenant's usage, with its debt brought up to `now_s`."""
        usage = self._usages.setdefault(tenant, Usage())
        usage.debt, usage.at_s = self._debt(tenant, now_s), now_s
        return usage

    def _debt(self, tenant: str, now_s: float) -> float:
        """Return the tenant's debt now. It falls with time, at the rate of the limit."""
        usage, limits = self._usages.get(tenant), self._limits_of(tenant)
        if not usage or not limits or limits.uncached_tokens_per_minute is None:
            return 0.0
        per_s = self._share(limits.uncached_tokens_per_minute) / MINUTE_S
        return max(0.0, usage.debt - per_s * max(0.0, now_s - usage.at_s))

    def _share(self, most: int) -> int:
        return max(1, most // self._shared_by)

    def _refusal(
        self, tenant: str, limit: Limit, most: int, asked: int, wait_s: float
    ) -> OverLimitError:
        return OverLimitError(tenant, limit, most, asked, wait_s, self._shared_by)


class Entry:
    """One request of a tenant with limits, while it is in flight.

    If a replica is lost, a prompt may be sent to several replicas one after the other. It is
    counted once.
    """

    def __init__(self, limits: Limits, tenant: str, usage: Usage) -> None:
        self.tenant = tenant
        self._limits = limits
        self._usage = usage
        self._prompt_tokens = 0
        self._charges: dict[str, int] = {}  # a prompt's id -> its uncached tokens
        self._computed = set[str]()  # ids of prompts with a first token
        self._is_over = False

    def take(self, prompt_tokens: int) -> None:
        """Count the prompt tokens of the request, of all its prompts together.

        Raises:
            OverLimitError: the tenant has too many prompt tokens in flight.
        """
        self._limits.check_prompt(self.tenant, prompt_tokens)
        self._prompt_tokens += prompt_tokens
        self._usage.prompt_tokens += prompt_tokens
        self._limits.note(self.tenant)

    def admit(self, id_: str, prompt_tokens: int, uncached_tokens: int, now_s: float) -> None:
        """Check the tenant's minute before a prompt goes to a replica.

        The check of the first prompt covers all prompts of the call, because they mostly share a
        prefix.

        Raises:
            OverLimitError: the minute has no room for the prompt's uncached tokens.
        """
        if id_ in self._charges:
            return
        if not self._charges:
            in_all = max(1, self._prompt_tokens / max(1, prompt_tokens))
            self._limits.check_minute(self.tenant, math.ceil(uncached_tokens * in_all), now_s)
        self._charge(id_, uncached_tokens, now_s)

    def computed(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        """Charge the uncached tokens of a prompt, as the engine counts them, at its first token."""
        if id_ in self._charges:
            self._computed.add(id_)
            self._charge(id_, uncached_tokens, now_s)

    def give_back(self, now_s: float) -> None:
        """Take back the charges of a refused request's prompts that were not computed."""
        for id_ in self._charges.keys() - self._computed:
            self._charge(id_, 0, now_s)

    def _charge(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        before = self._charges.get(id_, 0)
        self._charges[id_] = uncached_tokens
        self._limits.charge(self.tenant, uncached_tokens - before, now_s)

    def leave(self) -> None:
        """Record that the request has ended. A second call has no effect."""
        if self._is_over:
            return
        self._is_over = True
        self._usage.requests -= 1
        self._usage.prompt_tokens -= self._prompt_tokens
        self._limits.note(self.tenant)
