"""Adds tenants' usage to Redis every few seconds, in one account for each day.

While Redis is away, usage is kept here: at most MAX_TENANTS accounts and one batch for each of
KEPT_DAYS days. A batch without a reply from Redis is sent again unchanged, and counts once. A
router that is killed loses the usage of the last FLUSH_S seconds.
"""

import asyncio
import contextlib
import datetime
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from kvroute.router.accounting.accounts import bounded
from kvroute.store.accounts import KEPT_DAYS, MAX_TENANTS, Account, DailyAccounts, encode

FLUSH_S = 2.0  # time between two writes
DAY_S = 86_400


@dataclass(slots=True)
class Day:
    """A day's usage that Redis has not confirmed."""

    accounts: dict[str, Counter[str]] = field(default_factory=dict)  # not sent yet
    batch: tuple[int, bytes] | None = None  # number and content of a batch sent without a reply


class LastingAccounts:
    """One router's accounts of one model; `clock` returns seconds since 1970."""

    def __init__(
        self, store: DailyAccounts, router_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._clock = clock
        self._days: dict[int, Day] = {}  # days since 1970, oldest first
        self._batches = 0

    def add(self, tenant: str, used: Account) -> None:
        """Add usage to the tenant's account of today; Redis gets it with the next write."""
        today = int(self._clock() // DAY_S)
        if today not in self._days:
            self._days[today] = Day()
            if len(self._days) > KEPT_DAYS:
                del self._days[min(self._days)]
        bounded(self._days[today].accounts, tenant, most=MAX_TENANTS).update(used)

    async def run(self) -> None:
        """Write the usage to Redis every FLUSH_S until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.close()

    async def close(self) -> None:
        """Write the usage to Redis now, if Redis answers; the feed logs an outage."""
        with contextlib.suppress(RedisError, OSError):
            await self.flush()

    async def flush(self) -> None:
        """Write all usage to Redis; after RedisError or OSError, the rest is kept for later."""
        for number, day in list(self._days.items()):
            date = datetime.date(1970, 1, 1) + datetime.timedelta(days=number)
            if day.batch:
                await self._send(date, day)
            if day.accounts:
                await self._send(date, day)
            if not day.batch and not day.accounts:
                self._days.pop(number, None)

    async def of_days(self, days: Iterable[datetime.date]) -> dict[str, Account]:
        """Return each tenant's sum over the days, as stored in Redis.

        Raises:
            RedisError, OSError: Redis is away.
        """
        sums = dict[str, Counter[str]]()
        for day in days:
            for tenant, account in (await self._store.read(day)).items():
                sums.setdefault(tenant, Counter()).update(account)
        return dict(sums)

    async def _send(self, date: datetime.date, day: Day) -> None:
        if day.batch is None:
            self._batches += 1
            day.batch = self._batches, encode(day.accounts)
            day.accounts = {}
        sent = day.batch
        await self._store.add(date, self._router_id, *sent)
        if day.batch is sent:
            day.batch = None
