"""Counts each tenant's requests, tokens, and GPU seconds spent and saved.

A GPU second is one second of one GPU; a replica on CPUs counts as one GPU. GPU seconds are
estimated:

prefill     the speed model's time for the computed tokens, corrected by measured times to first
            token, times the number of GPUs of the replica's rank
decode      the request's share of the replica's time between its first and last token
            (decode_time.py), times the same number of GPUs
saved       the prefill time of the tokens that came from the cache, estimated in the same way

A request that continues at another replica after a loss counts as one request with its client's
tokens, and its GPU seconds are those of both replicas. If a replica is lost before a request's
first token, its work for the request is unknown and charged to no tenant.
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

NAMED = 100  # tenants with their own name in the metrics: the first ones that sent a request
OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "moved")
PHASES = ("prefill", "decode")
US = 1_000_000  # microseconds per second; times are whole microseconds, so that sums are exact


class Ledgers(Protocol):
    """A store of accounts that outlives the router."""

    def add(self, tenant: str, used: Account) -> None: ...


class Accounts(RequestObserver):
    """Counts requests with an API key when they end."""

    def __init__(self, *, gpus: int, lasting: Ledgers) -> None:
        self.totals: dict[str, Counter[str]] = {}  # by tenant, since the router's start
        self._gpus = gpus  # GPUs of each rank; 1 on CPUs
        self._lasting = lasting
        self._decoding: dict[
            str, DecodeTime
        ] = {}  # replicas at which this router's requests decode

    def first_token(self, attempt: Attempt) -> None:
        if not attempt.context.tenant or attempt.first_token_s is None:
            return
        decode_time = self._decoding.get(attempt.replica_id)
        if decode_time is None:
            decode_time = DecodeTime(attempt.load, attempt.first_token_s)
            self._decoding[attempt.replica_id] = decode_time
        decode_time.begin(attempt.request_id, attempt.first_token_s)

    def ended(self, attempt: Attempt) -> None:
        tenant = attempt.context.tenant
        if not tenant or attempt.outcome == "moved":  # counted when it ends at another replica
            return
        usage = used(attempt, gpus=self._gpus, decode_s=self._decode_s(attempt))
        bounded(self.totals, tenant, most=NAMED).update(usage)
        self._lasting.add(tenant, usage)

    def _decode_s(self, attempt: Attempt) -> float:
        decode_time = self._decoding.get(attempt.replica_id)
        if decode_time is None or attempt.last_chunk_s is None:
            return 0.0
        seconds = decode_time.end(attempt.request_id, attempt.last_chunk_s)
        if decode_time.is_over:
            del self._decoding[attempt.replica_id]
        return seconds


def bounded(accounts: dict[str, Counter[str]], tenant: str, *, most: int) -> Counter[str]:
    """Return the tenant's account, or that of OTHER if there would be more than `most`."""
    return accounts.setdefault(named(tenant, accounts, most=most), Counter())


def named(tenant: str, known: Collection[str], *, most: int) -> str:
    """Return the tenant's name, or OTHER if there are `most` other names already."""
    has_room = len(known) - (OTHER in known) < most
    return tenant if has_room or tenant in known else OTHER


def used(attempt: Attempt, *, gpus: int, decode_s: float) -> dict[str, int]:
    """Return what an ended attempt adds to its tenant's account, without zeros.

    These are its outcome, its tokens by cause, and its times in microseconds.
    """
    usage = {attempt.outcome or "ok": 1, "output_tokens": attempt.output_tokens}
    usage["decode_us"] = round(US * gpus * decode_s)
    ledger = attempt.ledger()
    if ledger is not None:
        tokens = attempt.dispatch.prompt_tokens
        cached = min(ledger.hit + ledger.unexpected_hit, tokens)
        usage["prefill_us"] = _prefill_us(attempt, cached, tokens, gpus)
        if not attempt.context.is_resumed:
            usage |= msgspec.structs.asdict(ledger)
            usage["saved_us"] = _prefill_us(attempt, 0, cached, gpus)
    return {name: count for name, count in usage.items() if count}


def _prefill_us(attempt: Attempt, start: int, end: int, gpus: int) -> int:
    load = attempt.load
    return round(US * gpus * load.speed.slowness * load.model.seconds(start, end))


def as_json(tenant: str, account: Account) -> dict[str, Any]:
    """Return the account as JSON for clients, with times in GPU seconds."""
    return {
        "tenant": tenant,
        "requests": {outcome: account.get(outcome, 0) for outcome in OUTCOMES},
        "prompt_tokens": {cause: account.get(cause, 0) for cause in CAUSES},
        "output_tokens": account.get("output_tokens", 0),
        "gpu_seconds": {phase: account.get(f"{phase}_us", 0) / US for phase in PHASES},
        "gpu_seconds_saved": account.get("saved_us", 0) / US,
    }
