"""A router adds what tenants use to Redis every few seconds, each day's to that day's account.

While Redis is away it waits here: at most MAX_TENANTS and one batch for each of KEPT_DAYS. A batch
whose answer was lost is sent again as it is, and counts once. A router that is killed loses what it
has not sent: FLUSH_S of what had ended.
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

FLUSH_S = 2.0
DAY_S = 86_400


@dataclass(slots=True)
class Day:
    """What Redis does not have, as far as the router knows."""

    accounts: dict[str, Counter[str]] = field(default_factory=dict)  # not sent
    batch: tuple[int, bytes] | None = None  # sent, perhaps in vain: its number and content


class LastingAccounts:
    """One router's, of one model. clock: seconds since 1970."""

    def __init__(
        self, store: DailyAccounts, router_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._clock = clock
        self._days: dict[int, Day] = {}  # days since 1970, oldest first
        self._batches = 0

    def add(self, tenant: str, used: Account) -> None:
        """Add usage to today's account of the tenant; it is written soon."""
        today = int(self._clock() // DAY_S)
        if today not in self._days:
            self._days[today] = Day()
            if len(self._days) > KEPT_DAYS:
                del self._days[min(self._days)]
        bounded(self._days[today].accounts, tenant, most=MAX_TENANTS).update(used)

    async def run(self) -> None:
        """Write waiting usage to Redis until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.close()

    async def close(self) -> None:
        """Write waiting usage now, if Redis answers; the feed logs an outage."""
        with contextlib.suppress(RedisError, OSError):
            await self.flush()

    async def flush(self) -> None:
        """Redis has all that was added before. RedisError or OSError: the rest still waits."""
        for number, day in list(self._days.items()):
            date = datetime.date(1970, 1, 1) + datetime.timedelta(days=number)
            if day.batch:
                await self._send(date, day)
            if day.accounts:
                await self._send(date, day)
            if not day.batch and not day.accounts:
                self._days.pop(number, None)

    async def of_days(self, days: Iterable[datetime.date]) -> dict[str, Account]:
        """Return the sums of each tenant, as Redis has them.

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
