"""A tenant is charged for its requests' tokens and for the GPU time that they took."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvroute.contract.generation import Chunk
from kvroute.features.gate import Entry
from kvroute.features.keys.accounting.accounts import MAX_NAMES, US, Accounts, account_of, as_json
from kvroute.features.keys.accounting.tenant_metrics import TenantMetrics
from kvroute.features.keys.limit_headers import OverLimitError
from kvroute.features.keys.limits import OTHER, TenantLimits
from kvroute.features.keys.router_limits import Limits
from kvroute.prefill.speed import PrefillSpeed
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import Attempt, Outcome, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.ledger import CAUSES
from tests.support.records import record

TOKENS_PER_S = 1000.0  # speed of prefill for prompts of every length


class AsPredicted(PrefillSpeed):
    """The speed of a replica that is always as fast as predicted."""

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """Ignore measured times."""


class Charged:
    """A router with two replicas, and its accounts."""

    def __init__(self, *, gpus: int = 1) -> None:
        self.sums = defaultdict[str, Counter[str]](Counter)
        self.accounts = Accounts(
            gpus=gpus, keep=lambda tenant, used: self.sums[tenant].update(used)
        )
        self.registry = CollectorRegistry()
        self.registry.register(TenantMetrics(self.accounts))
        self.fleet = Fleet(
            model="m", revision="", block_size=4, rng=random.Random(0), observer=self.accounts
        )
        self.fleet.update([record(name, prefill_tokens_per_s=TOKENS_PER_S) for name in "ab"])
        for name in "ab":
            self.fleet.mirror.join(name)
        self._numbers = count()

    def send(
        self, tenant: str, tokens: int = 100, *, to: str = "a", at_s: float = 0.0, **context: Any
    ) -> Attempt:
        number = next(self._numbers)
        ids = np.arange(tokens, dtype=np.uint32) + 1000 * number
        placement = self.fleet.place(ids, ["a", "b"], at_s)
        asked = RequestContext(at_s, entry=Entry(tenant), **context)
        attempt = self.fleet.sent(placement, to, str(number), at_s, asked)
        attempt.load.speed = AsPredicted()
        return attempt

    def account(self, tenant: str) -> dict[str, Any]:
        return as_json(tenant, self.sums[tenant])

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvroute_tenant_{name}_total", labels)


def receive(
    attempt: Attempt, *, at_s: float, tokens: int = 1, cached: int = 0, is_last: bool = False
) -> None:
    attempt.receive(Chunk((7,) * tokens, cached, is_last), at_s)


def test_computed_tokens_are_charged_as_prefill_and_cached_ones_count_as_saved() -> None:
    charged = Charged(gpus=4)
    attempt = charged.send("acme")
    receive(attempt, at_s=1.0, cached=80, is_last=True)
    attempt.end()
    account = charged.account("acme")
    assert account["requests"] == {"ok": 1, "cancelled": 0, "refused": 0, "failed": 0}
    assert account["gpu_seconds"] == {"prefill": 4 * 0.02, "decode": 0.0}
    assert account["gpu_seconds_saved"] == 4 * 0.08
    assert account["prompt_tokens"]["unexpected_hit"] == 80


def test_requests_that_decode_together_share_the_replicas_time() -> None:
    charged = Charged()
    one, two = charged.send("one", tokens=1), charged.send("two", tokens=1)
    for attempt in (one, two):
        receive(attempt, at_s=10.0, cached=100)
    receive(one, at_s=12.0, is_last=True)
    one.end()
    receive(two, at_s=15.0, is_last=True)
    two.end()
    assert charged.account("one")["gpu_seconds"]["decode"] == pytest.approx(1.0, abs=0.001)
    assert charged.account("two")["gpu_seconds"]["decode"] == pytest.approx(4.0, abs=0.001)


def test_a_prefill_is_not_charged_to_requests_that_decode_meanwhile() -> None:
    charged = Charged()
    decodes, computed = charged.send("decodes"), charged.send("computed", tokens=1000)
    receive(decodes, at_s=10.0, cached=100)
    receive(computed, at_s=12.0)
    computed.end()
    receive(decodes, at_s=12.0, is_last=True)
    decodes.end()
    assert charged.account("decodes")["gpu_seconds"]["decode"] == pytest.approx(1.0, abs=0.001)
    assert charged.account("computed")["gpu_seconds"]["prefill"] == pytest.approx(1.0)


def test_requests_of_other_routers_count_in_the_division() -> None:
    charged = Charged()
    own, foreign = charged.send("acme"), charged.send("")
    receive(own, at_s=10.0, cached=100)
    receive(foreign, at_s=10.0, cached=100)
    receive(own, at_s=12.0, is_last=True)
    own.end()
    assert 1.0 <= charged.account("acme")["gpu_seconds"]["decode"] < 2.0
    assert list(charged.sums) == ["acme"]


def test_a_request_that_two_replicas_answered_counts_once_with_the_time_of_both() -> None:
    charged = Charged()
    lost = charged.send("acme")
    receive(lost, at_s=1.0, tokens=3)
    receive(lost, at_s=2.0, tokens=2)
    lost.end("failed")
    second = charged.send("acme", tokens=105, to="b", at_s=3.0, is_resumed=True)
    receive(second, at_s=4.0)
    receive(second, at_s=7.0, tokens=4, is_last=True)
    second.end()
    account = charged.account("acme")
    assert account["requests"] == {"ok": 1, "cancelled": 0, "refused": 0, "failed": 1}
    assert sum(account["prompt_tokens"].values()) == 100
    assert account["output_tokens"] == 10
    assert account["gpu_seconds"]["prefill"] == pytest.approx(0.100 + 0.105)
    assert account["gpu_seconds"]["decode"] == pytest.approx(1.0 + 3.0)


def test_a_request_that_moved_before_its_first_token_or_was_refused_costs_nothing() -> None:
    charged = Charged()
    charged.send("acme").end("moved")
    charged.send("acme").end("refused")
    account = charged.account("acme")
    assert account["requests"] == {"ok": 0, "cancelled": 0, "refused": 1, "failed": 0}
    assert account["gpu_seconds"] == {"prefill": 0.0, "decode": 0.0}


def test_requests_without_a_key_are_not_counted() -> None:
    charged = Charged()
    attempt = charged.send("")
    receive(attempt, at_s=1.0, is_last=True)
    attempt.end()
    assert not charged.accounts.totals
    assert not charged.sums
    assert charged.value("output_tokens", tenant="") is None


def test_the_number_of_tenants_with_their_own_series_is_limited() -> None:
    charged = Charged()
    for number in range(MAX_NAMES + 5):
        attempt = charged.send(f"t{number}")
        receive(attempt, at_s=1.0, is_last=True)
        attempt.end()
    charged.send("t0").end("refused")
    samples = [sample for metric in charged.registry.collect() for sample in metric.samples]
    named = {sample.labels["tenant"] for sample in samples}
    assert named == {f"t{number}" for number in range(MAX_NAMES)} | {OTHER}
    assert charged.value("requests", tenant=OTHER, outcome="ok") == 5
    assert charged.value("requests", tenant="t0", outcome="refused") == 1
    assert len(charged.sums) == MAX_NAMES + 5


def test_a_tenant_named_other_does_not_count_towards_the_limit() -> None:
    accounts = dict[str, Counter[str]]()
    for name in ("a", OTHER, "b", "c"):
        account_of(name, accounts, limit=2).update({"ok": 1})
    assert accounts == {"a": {"ok": 1}, OTHER: {"ok": 2}, "b": {"ok": 1}}


ENDS: tuple[Outcome | None, ...] = (None, "cancelled", "refused", "failed", "moved")
ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),  # tenant
        st.integers(1, 60),  # prompt tokens
        st.integers(0, 80),  # cached, as the engine claims
        st.integers(0, 4),  # chunks
        st.sampled_from(ENDS),
    ),
    max_size=20,
)


@given(ATTEMPTS, st.integers(1, 8))
def test_accounts_are_the_sums_of_their_requests(
    attempts: Sequence[tuple[str, int, int, int, Outcome | None]], gpus: int
) -> None:
    """All requests together are charged no more GPU time than has elapsed."""
    charged, expected, sent = Charged(gpus=gpus), Counter[tuple[str, str]](), []
    now_s = 0.0
    for number, (tenant, tokens, *_) in enumerate(attempts):
        sent.append(charged.send(tenant, tokens, at_s=0.0, to="ab"[number % 2]))
    for number, attempt in enumerate(sent):
        _, _, cached, chunks, end = attempts[number]
        for chunk in range(chunks):
            now_s += 0.25
            receive(attempt, at_s=now_s, cached=cached, is_last=chunk == chunks - 1)
        if number % 3 == 2:  # others go on for longer
            attempt.end(end)
    for attempt, (tenant, *_, end) in zip(sent, attempts, strict=True):
        attempt.end(end)
        if attempt.outcome == "moved":
            continue
        expected[tenant, attempt.outcome or ""] += 1
        expected[tenant, "output_tokens"] += attempt.output_tokens
        if ledger := attempt.ledger():
            for cause, tokens in msgspec.structs.asdict(ledger).items():
                expected[tenant, cause] += tokens
    counted = Counter(
        {
            (tenant, name): tokens
            for tenant, account in charged.sums.items()
            for name, tokens in account.items()
            if not name.endswith("_us")
        }
    )
    assert counted == +expected
    assert sum(charged.value("output_tokens", tenant=name) or 0 for name in "abc") == sum(
        expected[name, "output_tokens"] for name in "abc"
    )
    assert all(
        charged.value("prompt_tokens", tenant=name, cause=cause) == expected[name, cause]
        for name in charged.accounts.totals
        for cause in CAUSES
    )
    decoded_s = sum(usage["decode_us"] for usage in charged.sums.values()) / US
    assert 0 <= decoded_s <= 2 * gpus * now_s + 1e-3  # two replicas


def test_refusals_count_by_limit_and_only_so_many_tenants_have_series_of_their_own() -> None:
    charged = Charged()
    for number in range(2 * MAX_NAMES):
        for tenant in (f"t{number}", "t0"):
            charged.accounts.refused(over_limit(tenant))
    charged.accounts.refused(ApiError(429, "busy"))
    refused = {
        sample.labels["tenant"]: sample.value
        for metric in charged.registry.collect()
        for sample in metric.samples
        if sample.name == "kvroute_tenant_refused_requests_total"
    }
    assert len(refused) == MAX_NAMES + 1
    assert refused[OTHER] == MAX_NAMES
    assert refused["t0"] == 2 * MAX_NAMES + 1


def over_limit(tenant: str) -> OverLimitError:
    with pytest.raises(OverLimitError) as refused:
        Limits(lambda _: TenantLimits(max_prompt_tokens=1)).check_prompt(tenant, 2, 0.0)
    return refused.value
