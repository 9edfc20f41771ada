"""Enforces the limits of tenants: requests and tokens in flight, and uncached tokens per minute.

This module only computes: it does not use the clock or the network. A router counts its own
requests at once, and those of other routers when they report them. So all routers together may
exceed a limit by the requests that they admitted since their last reports. If n routers are cut off
from each other, each of them enforces 1/n of each limit. Times are seconds of a monotonic clock.

A limit per minute is enforced by a debt: each uncached token adds 1 to the tenant's debt, and the
debt falls at the rate of the limit. A tenant has to wait while its debt is too high.
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
# Value of `retry-after` in seconds if a running request has to end first. The time of its end
# cannot be predicted.
RETRY_S = 1.0
# Shortest time between two reports of all tenants, in seconds. Routers send heartbeats at intervals
# of connections/peers.ALIVE_S, which is longer: so each heartbeat reports all tenants.
COMPLETE_S = 0.9
MAX_TENANTS = 10_000  # the most tenants that are counted for one other router
# Reports of other routers raise a tenant's debt at most to what its limit allows in this many
# minutes.
MAX_REPORTED_MINUTES = 10

NO_LIMITS = TenantLimits()

Limit = Literal["requests", "prompt_tokens", "uncached_tokens"]


@dataclass(eq=False)
class OverLimitError(Exception):
    """A request would exceed a limit of its tenant."""

    tenant: str
    limit: Limit
    maximum: int  # value of the limit in the key file
    requested: int  # amount that the request would add
    wait_s: float  # seconds until the request may be admitted; inf: it alone exceeds the limit
    # Number of routers that are cut off from each other, and enforce an equal part of `maximum`.
    # 1: they are connected.
    shared_by: int = 1


@dataclass(frozen=True, slots=True)
class Headroom:
    """A tenant's limits, what is left of them, and the estimated seconds until nothing is used.

    If `requests` or `tokens` is None, there is no such limit.
    """

    requests: int | None
    requests_left: int
    requests_reset_s: float
    tokens: int | None  # limit of uncached tokens per minute, or else of prompt tokens in flight
    tokens_left: int
    tokens_reset_s: float


@dataclass(slots=True)
class Usage:
    """One tenant's usage in this router. Only `debt` includes the requests of other routers."""

    requests: int = 0  # requests in flight
    prompt_tokens: int = 0  # prompt tokens of these requests
    spent: int = 0  # uncached tokens charged since the usage was first counted
    debt: float = 0.0  # uncached tokens that were charged and that the limit has not allowed yet
    debt_at_s: float = 0.0  # time for which `debt` was computed


class Limits:
    """The limits of all tenants in one router, for all its models.

    Args:
        limits_of: returns the current limits of a tenant, or None if it has no limits.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits | None]) -> None:
        # Called when there is something new to report.
        self.on_change: Callable[[], object] = lambda: None
        self._limits_of = limits_of
        self._usages: dict[str, Usage] = {}  # tenant with limits -> its usage, if any
        self._others: dict[str, dict[str, TenantCounts]] = {}  # router -> tenant -> its counts
        self._changed = set[str]()  # tenants whose counts changed since the last report
        self._complete_s = -math.inf  # time of the last complete report, with all tenants
        self._shared_by = 1  # number of routers among which each limit is divided

    # This router's requests.

    def enter(self, tenant: str, now_s: float) -> "Entry | None":
        """Count a request of the tenant as in flight until `Entry.leave`.

        Returns:
            None if the tenant has no limits.

        Raises:
            OverLimitError: the tenant has too many requests in flight.
        """
        limits = self._limits_of(tenant)
        if limits is None or not limits.are_counted:
            return None
        in_flight, _ = self.in_flight(tenant)
        if limits.max_requests is not None and in_flight >= self._share(limits.max_requests):
            raise self._refusal(tenant, "requests", limits.max_requests, 1, RETRY_S)
        usage = self._usage(tenant, now_s)
        usage.requests += 1
        self.mark_changed(tenant)
        return Entry(self, tenant, usage)

    def check_prompt(self, tenant: str, prompt_tokens: int) -> None:
        """Check that the tenant may add this many prompt tokens to those in flight.

        Raises:
            OverLimitError: the tenant would have too many prompt tokens in flight.
        """
        limits = self._limits_of(tenant) or NO_LIMITS
        maximum = limits.max_prompt_tokens
        if maximum is None:
            return
        _, in_flight = self.in_flight(tenant)
        # A tenant's only request may exceed this router's share of the limit.
        is_alone = in_flight == 0 and prompt_tokens <= maximum
        if in_flight + prompt_tokens > self._share(maximum) and not is_alone:
            wait_s = RETRY_S if prompt_tokens <= maximum else math.inf
            raise self._refusal(tenant, "prompt_tokens", maximum, prompt_tokens, wait_s)

    def check_minute(self, tenant: str, uncached_tokens: int, now_s: float) -> None:
        """Check that the tenant may spend these uncached tokens now.

        If a request has more tokens than half of the limit per minute, it is admitted when half of
        the limit is left. Otherwise the tenant's small requests could delay it forever. All of its
        tokens are charged, so the next requests wait longer.

        Raises:
            OverLimitError: the tenant has to wait.
        """
        limits = self._limits_of(tenant) or NO_LIMITS
        maximum = limits.uncached_tokens_per_minute
        if maximum is None:
            return
        share = self._share(maximum)
        # Number of tokens by which the debt has to fall first.
        missing = min(uncached_tokens, share / 2) - (share - self._debt(tenant, now_s))
        if missing > 0:
            wait_s = missing * MINUTE_S / share
            raise self._refusal(tenant, "uncached_tokens", maximum, uncached_tokens, wait_s)

    def charge(self, tenant: str, uncached_tokens: int, now_s: float) -> None:
        """Charge the tenant for uncached tokens. A negative number refunds an earlier charge."""
        usage = self._usage(tenant, now_s)
        usage.debt = max(0.0, usage.debt + uncached_tokens)
        usage.spent = max(0, usage.spent + uncached_tokens)
        self.mark_changed(tenant)

    def mark_changed(self, tenant: str) -> None:
        """Include the tenant's counts in the next report."""
        self._changed.add(tenant)
        self.on_change()

    def in_flight(self, tenant: str) -> tuple[int, int]:
        """Return the tenant's requests in flight, and their prompt tokens.

        They include those of other routers, unless this router is cut off from these.
        """
        usage = self._usages.get(tenant)
        requests, tokens = (usage.requests, usage.prompt_tokens) if usage else (0, 0)
        if self._shared_by > 1:
            return requests, tokens
        for reported in self._others.values():
            if counts := reported.get(tenant):
                requests, tokens = requests + counts.requests, tokens + counts.prompt_tokens
        return requests, tokens

    def headroom(self, tenant: str, now_s: float) -> Headroom:
        """Return what is left of the tenant's limits."""
        limits = self._limits_of(tenant) or NO_LIMITS
        requests, tokens = self.in_flight(tenant)
        max_requests = self._share(limits.max_requests or 0)
        per_minute, max_tokens = limits.uncached_tokens_per_minute, limits.max_prompt_tokens
        if per_minute is None:
            left, reset_s = self._share(max_tokens or 0) - tokens, RETRY_S if tokens else 0.0
        else:
            debt = self._debt(tenant, now_s)
            left = int(self._share(per_minute) - debt)
            reset_s = debt * MINUTE_S / self._share(per_minute)
        return Headroom(
            limits.max_requests,
            max(0, max_requests - requests),
            RETRY_S if requests else 0.0,
            per_minute or max_tokens,
            max(0, left),
            reset_s,
        )

    # The other routers.

    @property
    def shared_by(self) -> int:
        """Return the number of routers that divide the limits; 1 if all are connected."""
        return self._shared_by

    def report(self, now_s: float) -> tuple[list[TenantCounts], bool]:
        """Return the counts to publish, and whether the report is complete.

        A complete report has all tenants with requests in flight or a debt.
        """
        is_complete = now_s - self._complete_s >= COMPLETE_S
        if is_complete:
            self._complete_s = now_s
            self._forget_idle(now_s)
            self._changed = set(self._usages)
        tenants, self._changed = self._changed, set()
        return [self._counts(tenant, now_s) for tenant in tenants], is_complete

    def force_complete_report(self) -> None:
        """Make the next report complete, because an earlier report was lost."""
        self._complete_s = -math.inf

    def receive(
        self, router: str, counts: Iterable[TenantCounts], *, is_complete: bool, now_s: float
    ) -> None:
        """Record another router's report.

        Reports of a new router are ignored until its first complete report.
        """
        before = self._others.get(router)
        if before is None and not is_complete:
            return
        counted = before if before and not is_complete else dict[str, TenantCounts]()
        reported = {count.tenant: count for count in counts}
        limit = MAX_TENANTS - len(counted)  # number of tenants that can be counted in addition
        new = [*islice((tenant for tenant in reported if tenant not in counted), limit)]
        reported = {
            tenant: reported[tenant] for tenant in [*new, *(reported.keys() & counted.keys())]
        }
        for tenant, count in reported.items():
            last = before.get(tenant) if before else None
            self._charge_other(count, last, before is None, now_s)
        counted.update(reported)
        self._others[router] = counted

    def forget(self, router: str) -> None:
        """Drop the counts of a router that has ended or is silent."""
        self._others.pop(router, None)

    def cut_off(self, now_s: float) -> None:
        """Enforce only this router's share of each limit until `rejoin`.

        Call this when no messages of other routers arrive.
        """
        self._divide(max(self._shared_by, 1 + len(self._others)), now_s)

    def rejoin(self, now_s: float) -> None:
        """Enforce the whole limits again, because messages of other routers arrive again."""
        self._divide(1, now_s)

    def _divide(self, routers: int, now_s: float) -> None:
        """Divide the limits, and the tenants' debts, among this many routers."""
        if routers == self._shared_by:
            return
        for tenant, usage in self._usages.items():
            usage.debt = self._debt(tenant, now_s) * self._shared_by / routers
            usage.debt_at_s = now_s
        self._shared_by = routers
        self.force_complete_report()

    def _charge_other(
        self, reported: TenantCounts, before: TenantCounts | None, is_first: bool, now_s: float
    ) -> None:
        """Add to a tenant's debt what it has spent at another router.

        Args:
            reported: the tenant's counts in that router's new report.
            before: the tenant's counts in that router's previous report, if there were any.
            is_first: whether this is that router's first report. Then this router adopts the
                reported debt if it is higher.
        """
        limits = self._limits_of(reported.tenant)
        per_minute = limits and limits.uncached_tokens_per_minute
        if self._shared_by > 1 or not per_minute:
            return
        spent = reported.spent - (before.spent if before else 0)
        if not (spent or is_first):
            return
        usage = self._usage(reported.tenant, now_s)
        debt = max(usage.debt, reported.debt) if is_first else usage.debt + spent
        usage.debt = min(max(0.0, debt), max(usage.debt, MAX_REPORTED_MINUTES * per_minute))

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
        """Return the tenant's usage, after computing its debt at `now_s`."""
        usage = self._usages.setdefault(tenant, Usage())
        usage.debt, usage.debt_at_s = self._debt(tenant, now_s), now_s
        return usage

    def _debt(self, tenant: str, now_s: float) -> float:
        """Return the tenant's debt at `now_s`. It decreases over time at the rate of the limit."""
        usage, limits = self._usages.get(tenant), self._limits_of(tenant)
        if not usage or not limits or limits.uncached_tokens_per_minute is None:
            return 0.0
        per_s = self._share(limits.uncached_tokens_per_minute) / MINUTE_S
        return max(0.0, usage.debt - per_s * max(0.0, now_s - usage.debt_at_s))

    def _share(self, limit: int) -> int:
        """Return the part of a limit that this router enforces."""
        return max(1, limit // self._shared_by)

    def _refusal(
        self, tenant: str, limit: Limit, maximum: int, requested: int, wait_s: float
    ) -> OverLimitError:
        return OverLimitError(tenant, limit, maximum, requested, wait_s, self._shared_by)


class Entry:
    """One request of a tenant with limits, while it is in flight.

    If a replica is lost, a prompt is sent to another replica, but it is charged only once.
    """

    def __init__(self, limits: Limits, tenant: str, usage: Usage) -> None:
        self.tenant = tenant
        self._limits = limits
        self._usage = usage
        self._prompt_tokens = 0
        self._charges: dict[str, int] = {}  # id of a prompt -> uncached tokens charged for it
        self._computed = set[str]()  # ids of the prompts that had their first token
        self._is_over = False

    def add_prompt_tokens(self, prompt_tokens: int) -> None:
        """Count the tokens of all prompts of the request as in flight.

        Raises:
            OverLimitError: the tenant has too many prompt tokens in flight.
        """
        self._limits.check_prompt(self.tenant, prompt_tokens)
        self._prompt_tokens += prompt_tokens
        self._usage.prompt_tokens += prompt_tokens
        self._limits.mark_changed(self.tenant)

    def admit(self, id_: str, prompt_tokens: int, uncached_tokens: int, now_s: float) -> None:
        """Check the tenant's limit per minute, and charge a prompt, before it is sent to a replica.

        A call is checked once, when its first prompt is sent. The check assumes that the same share
        of each of its prompts is uncached, because they mostly have a common prefix.

        Args:
            id_: id of the prompt.
            uncached_tokens: estimate of the tokens that the replica has to compute.

        Raises:
            OverLimitError: the tenant has to wait.
        """
        if id_ in self._charges:
            return
        if not self._charges:
            # Number of prompts of the call, if all are as long as this one.
            prompts = max(1, self._prompt_tokens / max(1, prompt_tokens))
            self._limits.check_minute(self.tenant, math.ceil(uncached_tokens * prompts), now_s)
        self._charge(id_, uncached_tokens, now_s)

    def charge_computed(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        """At a prompt's first token, correct its charge to the tokens that the engine computed."""
        if id_ in self._charges:
            self._computed.add(id_)
            self._charge(id_, uncached_tokens, now_s)

    def refund(self, now_s: float) -> None:
        """Refund the charges of those prompts that had no first token; call it after a refusal."""
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
        self._limits.mark_changed(self.tenant)
