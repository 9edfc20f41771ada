"""Counts each tenant's requests, tokens, and GPU seconds spent and saved.

A GPU second is one second of one GPU; a replica on CPUs counts as one GPU. GPU seconds are
estimated:

prefill     the speed model's time for the computed tokens, corrected by measured times to first
            token, times the number of GPUs of the replica's data parallel rank
decode      the request's share of the replica's time between the request's first and last token
            (decode_time.py), times the same number of GPUs
saved       the prefill time of the tokens that came from the cache, estimated in the same way

If a replica is lost and another one continues its request, both outcomes are counted: "failed" and
that of the other replica. The prompt's tokens are counted once. The output tokens and GPU seconds
of both replicas are added up. If a replica is lost before a request's first token, the router does
not know how much it has computed, and charges nothing for it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from kvroute.features.keys.accounting.daily_accounts import Account
from kvroute.features.keys.accounting.decode_time import DecodeTime
from kvroute.features.keys.limit_headers import OverLimitError
from kvroute.features.keys.limits import OTHER
from kvroute.router.placement.attempts import Attempt, Outcome, RequestObserver
from kvroute.router.placement.ledger import CAUSES

# Number of tenants with their own name in the metrics. All later tenants share the name OTHER.
MAX_NAMES = 100
# "moved" is left out: another replica got the request, and its outcome is counted instead.
OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "moved")
PHASES = ("prefill", "decode")
US = 1_000_000  # microseconds per second; accounts have whole microseconds, so sums are exact


class Accounts(RequestObserver):
    """Counts each request that has an API key, when it ends.

    Args:
        gpus: number of GPUs of each rank; 1 on CPUs.
        keep: called with a tenant and what a request of it has used, when the request has ended.
    """

    def __init__(self, *, gpus: int, keep: Callable[[str, Account], object]) -> None:
        self.totals: dict[str, Counter[str]] = {}  # tenant -> usage since the router's start
        # Tenant -> number of requests that were rejected for each of its limits.
        self.refusals: dict[str, Counter[str]] = {}
        self._gpus = gpus
        self._keep = keep
        # Replica id -> the clock that divides its decode time, while requests of this router decode
        # there.
        self._decoding: dict[str, DecodeTime] = {}

    def first_token(self, attempt: Attempt) -> None:
        if not attempt.context.entry.tenant or attempt.first_token_s is None:
            return
        decode_time = self._decoding.get(attempt.replica_id)
        if decode_time is None:
            decode_time = DecodeTime(attempt.load, attempt.first_token_s)
            self._decoding[attempt.replica_id] = decode_time
        decode_time.begin(attempt.request_id, attempt.first_token_s)

    def refused(self, error: Exception) -> None:
        if isinstance(error, OverLimitError):
            account_of(error.tenant, self.refusals, limit=MAX_NAMES)[error.limit] += 1

    def ended(self, attempt: Attempt) -> None:
        tenant = attempt.context.entry.tenant
        if not tenant or attempt.outcome == "moved":  # another replica gets the request
            return
        usage = usage_of(attempt, gpus=self._gpus, decode_s=self._decode_s(attempt))
        account_of(tenant, self.totals, limit=MAX_NAMES).update(usage)
        self._keep(tenant, usage)

    def _decode_s(self, attempt: Attempt) -> float:
        decode_time = self._decoding.get(attempt.replica_id)
        if decode_time is None or attempt.last_chunk_s is None:
            return 0.0
        seconds = decode_time.end(attempt.request_id, attempt.last_chunk_s)
        if decode_time.is_over:
            del self._decoding[attempt.replica_id]
        return seconds


def account_of(tenant: str, accounts: dict[str, Counter[str]], *, limit: int) -> Counter[str]:
    """Return the tenant's account, after adding it if it is new.

    If `limit` tenants have an account already, a new tenant gets that of OTHER.
    """
    has_room = len(accounts) - (OTHER in accounts) < limit
    name = tenant if has_room or tenant in accounts else OTHER
    return accounts.setdefault(name, Counter())


def usage_of(attempt: Attempt, *, gpus: int, decode_s: float) -> dict[str, int]:
    """Return what an attempt, one request at one replica, adds to its tenant's account.

    Args:
        gpus: number of GPUs of the replica's rank.
        decode_s: seconds of decoding that are charged to the attempt.

    Returns:
        The outcome with the count 1, the number of output tokens, the number of prompt tokens for
        each cause (placement/ledger.py), and GPU times in microseconds. Zeros are left out.
    """
    usage = {attempt.outcome or "ok": 1, "output_tokens": attempt.output_tokens}
    usage["decode_us"] = round(US * gpus * decode_s)
    ledger = attempt.ledger()
    if ledger is not None:
        tokens = attempt.dispatch.prompt_tokens
        cached = min(ledger.cached, tokens)
        usage["prefill_us"] = _prefill_us(attempt, cached, tokens, gpus)
        if not attempt.context.is_resumed:  # the first replica's attempt has counted the prompt
            usage |= msgspec.structs.asdict(ledger)
            usage["saved_us"] = _prefill_us(attempt, 0, cached, gpus)
    return {name: count for name, count in usage.items() if count}


def _prefill_us(attempt: Attempt, start: int, end: int, gpus: int) -> int:
    """Return the predicted GPU microseconds to compute the prompt's tokens from start to end."""
    load = attempt.load
    return round(US * gpus * load.computing_s(start, end))


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
