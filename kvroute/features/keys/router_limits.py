"""Enforces the limits of tenants: requests and tokens in flight, and uncached tokens per minute.

This module only computes: it does not use the clock or the network. A router counts its own
requests at once, and those of other routers when they report them. So all routers together may
exceed a limit by the requests that they admitted since their last reports. If n routers are cut off
from each other, each of them enforces 1/n of each limit. Times are seconds of a monotonic clock.

A limit per minute is enforced by a debt: each uncached token adds 1 to the tenant's debt, and the
debt falls at the rate of the limit. A tenant has to wait while its debt is too high.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from msgspec import Struct

from kvroute.contract.records import MAX_COUNT, Count, Name
from kvroute.features.gate import Entry
from kvroute.features.keys.limit_headers import Headroom, Left, Limit, OverLimitError, rate_headers
from kvroute.features.keys.limits import TenantLimits

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


class TenantCounts(Struct, array_like=True):
    """The usage of a tenant with limits, at one router."""

    tenant: Name
    requests: Count  # running or waiting requests
    prompt_tokens: Count  # prompt tokens of these requests
    spent: Count  # uncached prompt tokens computed since the router began to count
    debt: Count  # uncached tokens of all routers that still count against the rate limit


class TenantReport(Struct, array_like=True):
    """What a router tells the others about its tenants with limits."""

    counts: list[TenantCounts]  # of the tenants whose counts have changed
    is_complete: bool  # True: tenants that are not listed have no usage at this router


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

    What would exceed a limit is refused with OverLimitError.

    Args:
        limits_of: returns the current limits of a tenant.
    """

    def __init__(self, limits_of: Callable[[str], TenantLimits]) -> None:
        # Called when there is something new to report.
        self.on_change: Callable[[], object] = lambda: None
        self._limits_of = limits_of
        self._usages: dict[str, Usage] = {}  # tenant with limits -> its usage, if any
        self._others: dict[str, dict[str, TenantCounts]] = {}  # router -> tenant -> its counts
        self._changed = set[str]()  # tenants whose counts changed since the last report
        self._complete_s = -math.inf  # time of the last complete report, with all tenants
        # Number of routers that divide the limits; 1: all are connected.
        self.shared_by = 1

    # This router's requests.

    def enter(self, tenant: str, now_s: float) -> "CountedEntry | None":
        """Count a request as in flight until `Entry.leave`; None if the tenant has no limits."""
        limits = self._limits_of(tenant)
        if not limits.are_counted:
            return None
        in_flight, _ = self.in_flight(tenant)
        if limits.max_requests is not None and in_flight >= self._share(limits.max_requests):
            raise self._refusal(tenant, "requests", limits.max_requests, 1, RETRY_S, now_s)
        usage = self._usage(tenant, now_s)
        usage.requests += 1
        self.mark_changed(tenant)
        return CountedEntry(self, tenant, usage)

    def check_prompt(self, tenant: str, prompt_tokens: int, now_s: float) -> None:
        """Check that the tenant may add this many prompt tokens to those in flight."""
        limits = self._limits_of(tenant)
        maximum = limits.max_prompt_tokens
        if maximum is None:
            return
        _, in_flight = self.in_flight(tenant)
        # A tenant's only request may exceed this router's share of the limit.
        is_alone = in_flight == 0 and prompt_tokens <= maximum
        if in_flight + prompt_tokens > self._share(maximum) and not is_alone:
            wait_s = RETRY_S if prompt_tokens <= maximum else math.inf
            raise self._refusal(tenant, "prompt_tokens", maximum, prompt_tokens, wait_s, now_s)

    def check_minute(self, tenant: str, uncached_tokens: int, now_s: float) -> None:
        """Check that the tenant may spend these uncached tokens now.

        If a request has more tokens than half of the limit per minute, it is admitted when half of
        the limit is left. Otherwise the tenant's small requests could delay it forever. All of its
        tokens are charged, so the next requests wait longer.
        """
        limits = self._limits_of(tenant)
        maximum = limits.uncached_tokens_per_minute
        if maximum is None:
            return
        share = self._share(maximum)
        # Number of tokens by which the debt has to fall first.
        missing = min(uncached_tokens, share / 2) - (share - self._debt(tenant, now_s))
        if missing > 0:
            wait_s = missing * MINUTE_S / share
            raise self._refusal(tenant, "uncached_tokens", maximum, uncached_tokens, wait_s, now_s)

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
        if self.shared_by > 1:
            return requests, tokens
        for reported in self._others.values():
            if counts := reported.get(tenant):
                requests, tokens = requests + counts.requests, tokens + counts.prompt_tokens
        return requests, tokens

    def headroom(self, tenant: str, now_s: float) -> Headroom:
        """Return what is left of the tenant's limits."""
        limits, headroom = self._limits_of(tenant), dict[str, Left]()
        requests, tokens = self.in_flight(tenant)
        if (most := limits.max_requests) is not None:
            left = max(0, self._share(most) - requests)
            headroom["requests"] = Left(most, left, RETRY_S if requests else 0.0)
        if (most := limits.uncached_tokens_per_minute) is not None:
            share, debt = self._share(most), self._debt(tenant, now_s)
            headroom["tokens"] = Left(most, max(0, int(share - debt)), debt * MINUTE_S / share)
        elif (most := limits.max_prompt_tokens) is not None:
            left = max(0, self._share(most) - tokens)
            headroom["tokens"] = Left(most, left, RETRY_S if tokens else 0.0)
        return headroom

    # The other routers.

    def report(self, now_s: float) -> TenantReport:
        """Return the counts to publish.

        A complete report has all tenants with requests in flight or a debt.
        """
        is_complete = now_s - self._complete_s >= COMPLETE_S
        if is_complete:
            self._complete_s = now_s
            self._forget_idle(now_s)
            self._changed = set(self._usages)
        tenants, self._changed = self._changed, set()
        return TenantReport([self._counts(tenant, now_s) for tenant in tenants], is_complete)

    def receive(self, router: str, report: TenantReport, now_s: float) -> None:
        """Record another router's report.

        Reports of a new router are ignored until its first complete report.
        """
        before = self._others.get(router)
        if before is None and not report.is_complete:
            return
        counted = before if before and not report.is_complete else dict[str, TenantCounts]()
        reported = {count.tenant: count for count in report.counts}
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
        self._divide(max(self.shared_by, 1 + len(self._others)), now_s)

    def rejoin(self, now_s: float) -> None:
        """Enforce the whole limits again, because messages of other routers arrive again."""
        self._divide(1, now_s)

    def _divide(self, routers: int, now_s: float) -> None:
        """Divide the limits, and the tenants' debts, among this many routers."""
        if routers == self.shared_by:
            return
        for tenant, usage in self._usages.items():
            usage.debt = self._debt(tenant, now_s) * self.shared_by / routers
            usage.debt_at_s = now_s
        self.shared_by = routers
        self._complete_s = -math.inf  # the next report has all tenants

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
        per_minute = limits.uncached_tokens_per_minute
        if self.shared_by > 1 or not per_minute:
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
        if not usage or limits.uncached_tokens_per_minute is None:
            return 0.0
        per_s = self._share(limits.uncached_tokens_per_minute) / MINUTE_S
        return max(0.0, usage.debt - per_s * max(0.0, now_s - usage.debt_at_s))

    def _share(self, limit: int) -> int:
        """Return the part of a limit that this router enforces."""
        return max(1, limit // self.shared_by)

    def _refusal(
        self,
        tenant: str,
        limit: Limit,
        maximum: int,
        requested: int,
        wait_s: float,
        now_s: float,
    ) -> OverLimitError:
        return OverLimitError(
            tenant,
            limit,
            maximum,
            requested,
            wait_s,
            shared_by=self.shared_by,
            headroom=self.headroom(tenant, now_s),
        )


class CountedEntry(Entry):
    """One request of a tenant with limits, while it is in flight.

    If a replica is lost, a prompt is sent to another replica, but it is charged only once.
    """

    def __init__(self, limits: Limits, tenant: str, usage: Usage) -> None:
        super().__init__(tenant)
        self._limits = limits
        self._usage = usage
        self._prompt_tokens = 0
        self._charges: dict[str, int] = {}  # id of a prompt -> uncached tokens charged for it
        self._computed = set[str]()  # ids of the prompts that had their first token
        self._is_over = False

    def add_prompt_tokens(self, prompt_tokens: int, now_s: float) -> None:
        self._limits.check_prompt(self.tenant, prompt_tokens, now_s)
        self._prompt_tokens += prompt_tokens
        self._usage.prompt_tokens += prompt_tokens
        self._limits.mark_changed(self.tenant)

    def admit(self, id_: str, prompt_tokens: int, uncached_tokens: int, now_s: float) -> None:
        """Check the tenant's limit per minute, and charge the prompt.

        A call is checked once, when its first prompt is sent. The check assumes that the same share
        of each of its prompts is uncached, because they mostly have a common prefix.
        """
        if id_ in self._charges:
            return
        if not self._charges:
            # Number of prompts of the call, if all are as long as this one.
            prompts = max(1, self._prompt_tokens / max(1, prompt_tokens))
            self._limits.check_minute(self.tenant, math.ceil(uncached_tokens * prompts), now_s)
        self._charge(id_, uncached_tokens, now_s)

    def charge_computed(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        if id_ in self._charges:
            self._computed.add(id_)
            self._charge(id_, uncached_tokens, now_s)

    def refund(self, now_s: float) -> None:
        for id_ in self._charges.keys() - self._computed:
            self._charge(id_, 0, now_s)

    def _charge(self, id_: str, uncached_tokens: int, now_s: float) -> None:
        before = self._charges.get(id_, 0)
        self._charges[id_] = uncached_tokens
        self._limits.charge(self.tenant, uncached_tokens - before, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        return rate_headers(self._limits.headroom(self.tenant, now_s))

    def leave(self) -> None:
        """Record that the request has ended. A second call has no effect."""
        if self._is_over:
            return
        self._is_over = True
        self._usage.requests -= 1
        self._usage.prompt_tokens -= self._prompt_tokens
        self._limits.mark_changed(self.tenant)
