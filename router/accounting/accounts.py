"""A router counts what each tenant uses: requests, tokens, and seconds of GPUs spent and saved.

One GPU second is a second of one GPU; a replica on CPUs counts as one GPU. What is counted, and how
exact it is:

prefill     the speed model's time for the tokens that were computed, corrected by measured times to
            first tokens, times the GPUs of the replica's rank
decode      the request's share of the replica's time from its first token to its last
            (decode_time.py), times those GPUs
saved       the speed model's time for the tokens that came from the cache, likewise

A request that goes on at another replica because the first was lost is one request, with the tokens
that its client asked for. What it took is the sum of both. What a replica did before it was lost
without a first token is unknown, and no tenant's.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol, get_args

import msgspec

from kvroute.keys.limits import OTHER
from kvroute.router.accounting.decode_time import DecodeTime
from kvroute.router.placement.attempts import Attempt, Outcome, RequestObserver
from kvroute.router.placement.ledger import CAUSES
from kvroute.store.accounts import Account

NAMED = 100  # tenants with a name of their own in the metrics, first come
OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "moved")
PHASES = ("prefill", "decode")
US = 1_000_000  # times are counted in whole microseconds, whose sums are exact


class Ledgers(Protocol):
    """Where accounts last longer than the router."""

    def add(self, tenant: str, used: Account) -> None: ...


class Accounts(RequestObserver):
    """Counts requests that came with an API key, when they end; all others cost nothing."""

    def __init__(self, *, gpus: int, lasting: Ledgers) -> None:
        """gpus: of each rank; 1 on CPUs."""
        self.totals: dict[str, Counter[str]] = {}  # tenant -> account since the router's start
        self._gpus = gpus
        self._lasting = lasting
        self._decoding: dict[str, DecodeTime] = {}  # replicas where own requests decode

    def first_token(self, attempt: Attempt) -> None:
        if not attempt.context.tenant or attempt.first_token_s is None:
            return
        there = self._decoding.get(attempt.replica_id)
        if there is None:
            there = DecodeTime(attempt.load, attempt.first_token_s)
            self._decoding[attempt.replica_id] = there
        there.begin(attempt.request_id, attempt.first_token_s)

    def ended(self, attempt: Attempt) -> None:
        tenant = attempt.context.tenant
        if not tenant or attempt.outcome == "moved":  # another replica will report it
            return
        found = used(attempt, gpus=self._gpus, decode_s=self._decode_s(attempt))
        bounded(self.totals, tenant, most=NAMED).update(found)
        self._lasting.add(tenant, found)

    def _decode_s(self, attempt: Attempt) -> float:
        there = self._decoding.get(attempt.replica_id)
        if there is None or attempt.last_chunk_s is None:
            return 0.0
        seconds = there.end(attempt.request_id, attempt.last_chunk_s)
        if there.is_over:
            del self._decoding[attempt.replica_id]
        return seconds


def bounded(accounts: dict[str, Counter[str]], tenant: str, *, most: int) -> Counter[str]:
    """Return the tenant's account; a new one if there is none."""
    return accounts.setdefault(named(tenant, accounts, most=most), Counter())


def named(tenant: str, known: Collection[str], *, most: int) -> str:
    """Its name among those that are known; OTHER if it would be beyond `most`."""
    is_room = len(known) - (OTHER in known) < most
    return tenant if is_room or tenant in known else OTHER


def used(attempt: Attempt, *, gpus: int, decode_s: float) -> dict[str, int]:
    """Return what an ended attempt adds to its tenant's account, without zeros.

    These are its outcome, its tokens by cause, and times in microseconds.
    """
    found = {attempt.outcome or "ok": 1, "output_tokens": attempt.output_tokens}
    found["decode_us"] = round(US * gpus * decode_s)
    ledger = attempt.ledger()
    if ledger is not None:
        tokens = attempt.dispatch.prompt_tokens
        cached = min(ledger.hit + ledger.unexpected_hit, tokens)
        found["prefill_us"] = _prefill_us(attempt, cached, tokens, gpus)
        if not attempt.context.is_resumed:
            found |= msgspec.structs.asdict(ledger)
            found["saved_us"] = _prefill_us(attempt, 0, cached, gpus)
    return {name: count for name, count in found.items() if count}


def _prefill_us(attempt: Attempt, start: int, end: int, gpus: int) -> int:
    load = attempt.load
    return round(US * gpus * load.speed.slowness * load.model.seconds(start, end))


def as_json(tenant: str, account: Account) -> dict[str, Any]:
    """Return the account for clients; times are in GPU seconds."""
    return {
        "tenant": tenant,
        "requests": {outcome: account.get(outcome, 0) for outcome in OUTCOMES},
        "prompt_tokens": {cause: account.get(cause, 0) for cause in CAUSES},
        "output_tokens": account.get("output_tokens", 0),
        "gpu_seconds": {phase: account.get(f"{phase}_us", 0) / US for phase in PHASES},
        "gpu_seconds_saved": account.get("saved_us", 0) / US,
    }
