"""Adds tenants' usage to Redis every few seconds, in one account per tenant and day.

The usage since the last write is sent as a numbered batch. If Redis does not reply, the same batch
is sent again, and its number tells Redis to count it only once. While Redis is away, usage stays in
memory: for each of the last KEPT_DAYS days, at most MAX_TENANTS accounts and one batch. A router
that is killed loses the usage of the last FLUSH_S seconds.
"""

import asyncio
import contextlib
import datetime
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvroute.features.keys.accounting.accounts import account_of
from kvroute.features.keys.accounting.daily_accounts import (
    KEPT_DAYS,
    MAX_TENANTS,
    Account,
    DailyAccounts,
    encode,
)
from kvroute.store.connection import REDIS_ERRORS

FLUSH_S = 2.0  # seconds between two writes
DAY_S = 86_400  # seconds per day


@dataclass(slots=True)
class Day:
    """The usage of one day that Redis has not confirmed yet."""

    accounts: dict[str, Counter[str]] = field(default_factory=dict)  # tenant -> usage not sent yet
    batch: tuple[int, bytes] | None = None  # number and content of a batch that has no reply yet


class LastingAccounts:
    """One router's accounts for one model.

    Args:
        router_id: id of this router. Redis recognises a repeated batch by this id and its number.
        clock: returns seconds since 1970.
    """

    def __init__(
        self, store: DailyAccounts, router_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._clock = clock
        self._days: dict[int, Day] = {}  # day number since 1970 -> its usage, oldest first
        self._batches = 0  # number of the latest batch

    def add(self, tenant: str, used: Account) -> None:
        """Add usage to the tenant's account of today. The next write sends it to Redis."""
        today = int(self._clock() // DAY_S)
        if today not in self._days:
            self._days[today] = Day()
            if len(self._days) > KEPT_DAYS:
                del self._days[min(self._days)]
        account_of(tenant, self._days[today].accounts, limit=MAX_TENANTS).update(used)

    async def run(self) -> None:
        """Write the usage to Redis every FLUSH_S until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.close()

    async def close(self) -> None:
        """Write the usage to Redis now, if Redis can be reached.

        An outage is not logged here, since the feed (index/feed.py) logs it.
        """
        with contextlib.suppress(*REDIS_ERRORS):
            await self.flush()

    async def flush(self) -> None:
        """Write all usage to Redis.

        Raises:
            RedisError, OSError: Redis is away; a later call sends the usage that is left.
        """
        for number, day in list(self._days.items()):
            date = datetime.date(1970, 1, 1) + datetime.timedelta(days=number)
            if day.batch:
                await self._send(date, day)
            if day.accounts:
                await self._send(date, day)
            if not day.batch and not day.accounts:
                self._days.pop(number, None)

    async def sum_of_days(self, days: Iterable[datetime.date]) -> dict[str, Account]:
        """Return each tenant's usage, added up over the days, as stored in Redis.

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
