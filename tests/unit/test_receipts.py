"""A receipt has the facts about every replica, and the main reason of the placement."""

import json
import random
import re
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.blocks.tiers import HOST, TierBlocks
from kvroute.command.explain import EVICTED, TERMS, print_receipt, sentences
from kvroute.contract.keep import EVICTION_REASONS
from kvroute.features import TERMS as FEATURE_TERMS
from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.policy import Candidate, CostTerms, prices, rank
from kvroute.router.placement.receipts import REASONS, receipt
from kvroute.router.sessions.breaks import Break, Difference, Span
from tests.support.documents import API


def replica(name: str, **facts: Any) -> Candidate:
    return Candidate(name, hit_blocks=0, backlog_s=0.0, own_s=0.1)._replace(**facts)


def placement(*candidates: Candidate) -> Placement:
    common = prices(candidates, busy_s=1.0, pressure=0.5)
    ranking = rank(candidates, rng=random.Random(0), prices=common)
    best = max((candidate.hit_blocks for candidate in candidates), default=0)
    return Placement(
        tuple(ranking), (), best_hit_blocks=best, prompt_tokens=700, block_size=16, pressure=0.5
    )


@pytest.mark.parametrize(
    ("loser", "reason"),
    [
        ({"backlog_s": 2.0}, "other has 2 s more prefill queued"),
        ({"reload_s": 0.5}, "other would wait 500 ms longer for copies from slower memory"),
        ({"copy_s": 0.5}, "it has 0 of 700 tokens cached, and other has 0; computing the"),
        ({"memory_s": 0.5}, "the KV cache of other would have space for the prompt 500 ms later"),
        ({"decode_step_s": 0.01}, "this prompt would slow down fewer running answers"),
        ({"held_share": 3.0}, "running requests hold more of the KV cache of other"),
        ({"free_blocks": -1}, "other costs the same"),
    ],
)
def test_the_reason_is_the_term_with_the_largest_difference(
    loser: dict[str, Any], reason: str
) -> None:
    found = receipt(placement(replica("choice"), replica("other", **loser)), policy="kvroute")
    assert (found["choice"], found["runner_up"]) == ("choice", "other")
    assert found["reason"].startswith(reason)


def test_every_term_of_the_cost_has_words_wherever_people_see_it() -> None:
    table = API.read_text().split("| term | seconds for |")[1].split("\n\n")[0]
    in_the_document = re.findall(r"^\| `(\w+)` \|", table, re.M)
    ours = (*CostTerms._fields, *FEATURE_TERMS)
    assert (*REASONS,) == (*TERMS,) == ours
    # The document also has terms of features that are gone.
    assert in_the_document[: len(ours)] == [*ours]
    assert (*EVICTED,) == EVICTION_REASONS


def test_every_replica_is_listed_with_its_hits_in_tokens_and_terms_that_add_up() -> None:
    warm = replica("warm", hit_blocks=20, backlog_s=0.25)
    found = receipt(placement(replica("cold", copy_s=0.75), warm), policy="kvroute")
    assert [each["id"] for each in found["replicas"]] == ["warm", "cold"]
    assert [each["hit_tokens"] for each in found["replicas"]] == [320, 0]
    assert found["best_hit_tokens"] == 320
    for each in found["replicas"]:
        assert sum(each["terms_s"].values()) == pytest.approx(each["cost_s"], abs=1e-3)


def test_a_receipt_separates_reloaded_tokens_from_those_in_gpu_memory() -> None:
    warm = replica("warm", hit_blocks=20, reloads=(TierBlocks(HOST, 15),), reload_s=0.25)
    there = receipt(placement(warm), policy="kvroute")["replicas"][0]
    assert (there["hit_tokens"], there["host_tokens"]) == (320, 240)
    assert there["reload_s"] == there["terms_s"]["reload"] == 0.25


def test_a_receipt_without_reloads_has_no_fields_of_host_memory() -> None:
    some = receipt(placement(replica("a", hit_blocks=20, backlog_s=0.25)), policy="kvroute")
    assert json.dumps(some["replicas"]) == (
        '[{"id": "a", "hit_tokens": 320, "backlog_s": 0.25, "prefill_s": 0.1, "unanswered": 0, '
        '"free_blocks": 0, "cost_s": 1.225, "terms_s": {"waiting": 0.25, "memory": 0.0, '
        '"own": 0.975, "copy": 0.0, "setup": 0.0, "rotation": 0.0, "decode": 0.0, '
        '"eviction": 0.0}}]'
    )
    other = replica("b", hit_blocks=20, reloads=(TierBlocks(HOST, 15),), reload_s=0.25)
    both = receipt(placement(replica("a"), other), policy="kvroute")["replicas"]
    assert [each["host_tokens"] for each in both] == [0, 240]


def test_explain_shows_reloads_if_there_are_any() -> None:
    warm = replica("warm", hit_blocks=20, reloads=(TierBlocks(HOST, 15),), reload_s=0.25)
    found = " ".join(sentences(receipt(placement(warm), policy="kvroute")))
    assert "warm has 240 tokens in host memory; copying them takes 250 ms." in found
    plain = replica("plain", hit_blocks=20)
    found = " ".join(sentences(receipt(placement(plain), policy="kvroute")))
    assert "host memory" not in found


def test_explain_prints_the_costs_in_which_the_best_replicas_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = receipt(placement(replica("best"), replica("busy", backlog_s=2.0)), policy="kvroute")
    print_receipt(shown)
    replicas, costs = capsys.readouterr().out.split("extra cost")
    assert replicas.startswith("Goes to best: busy has 2 s more prefill queued")
    assert "busy" in replicas.split("prefill", 2)[-1]
    assert re.search(r"prefill queued there +0 +2\.0 s", costs)
    assert "host memory" not in costs


def test_a_policy_without_costs_has_receipts_without_costs() -> None:
    found = receipt(placement(replica("a"), replica("b")), policy="round-robin")
    assert found["congestion_price"] is None
    assert [each["terms_s"] for each in found["replicas"]] == [None, None]
    assert "round-robin ignores caches" in found["reason"]


def test_receipts_of_one_replica_and_of_no_replica() -> None:
    assert "no other replica" in receipt(placement(replica("a")), policy="kvroute")["reason"]
    assert receipt(placement(), policy="kvroute")["choice"] is None


def test_the_receipt_of_a_batch_request_says_that_the_queue_has_chosen_the_replica() -> None:
    """The queue gives the placement only the replica that it has chosen, whatever else is ready."""
    found = receipt(placement(replica("a")), policy="kvroute", is_batch=True)
    assert found["reason"] == "it costs least among the replicas with room for this batch request"


CHANGE = Difference(120, Span(4, "0a"), Span(6, "0b"), common=500)
BROKEN = Break("system", 0, CHANGE, kind="a date")


def test_a_receipt_shows_where_the_chat_changed_and_what_was_there() -> None:
    found = receipt(placement(replica("a")), policy="kvroute", broken=BROKEN)
    assert found["broken"] == {
        "message": {"index": 0, "role": "system"},
        "kind": "a date",
        "token": 120,
        "tokens": 500,
        "before": {"tokens": 4, "hash": "0a"},
        "after": {"tokens": 6, "hash": "0b"},
    }


def test_tokens_that_are_cached_in_spite_of_a_change_do_not_count_as_broken_on_a_receipt() -> None:
    some = replace(placement(replica("a")), known_blocks=20)
    found = receipt(some, policy="kvroute", broken=BROKEN)["broken"]
    assert found["tokens"] == 126 + 500 - 20 * 16
    whole = replace(some, known_blocks=40)
    assert receipt(whole, policy="kvroute", broken=BROKEN)["broken"] is None
    assert receipt(whole, policy="kvroute")["broken"] is None


def test_a_receipt_has_evicted_tokens_and_the_reason() -> None:
    some = replace(placement(replica("a", hit_blocks=5)), known_blocks=20)
    found = receipt(some, policy="kvroute", evicted_why="unlikely")["evicted"]
    assert found == {"tokens": 15 * 16, "why": "unlikely"}
    whole = replace(some, known_blocks=5)
    assert receipt(whole, policy="kvroute", evicted_why="unlikely")["evicted"] is None
