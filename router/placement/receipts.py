"""Receipts: each explains a placement with its numbers, and its main reason in a sentence."""

from collections.abc import Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from kvroute.blocks.tiers import Tier
from kvroute.blocks.variants import name_of
from kvroute.features import TERMS
from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.policy import Candidate, prices, terms_s
from kvroute.router.sessions.breaks import Break

RECEIPTS = "kvroute_receipts"  # the field of a response that has the receipts of its prompts

# Term of the cost -> the reason to show if this term makes most of the difference between the
# chosen replica ("it") and the runner-up ({other}).
REASONS = {
    "waiting": "{other} has {seconds} more prefill queued",
    "reload": "{other} would wait {seconds} longer for copies from slower memory",
    "memory": "the KV cache of {other} would have space for the prompt {seconds} later",
    "own": "{other} would take {seconds} longer to compute the tokens that no replica has cached",
    "copy": "it has {hits} of {tokens} tokens cached, and {other} has {other_hits}; computing the "
    "difference there would take {seconds}",
    "setup": "it has loaded the LoRA adapter; loading it on {other} would take {seconds}",
    "rotation": "new conversations rotate over idle replicas, and this one is next",
    "decode": "this prompt would slow down fewer running answers on it than on {other}",
    "eviction": "running requests hold more of the KV cache of {other}, so that new blocks there "
    "would evict more that is needed again",
    **{name: text.reason for name, text in TERMS.items()},
}
# Term of the cost -> the field of Candidate with the term's time in seconds. The cost is that time
# multiplied by a price.
SECONDS = {
    "waiting": "backlog_s",
    "reload": "reload_s",
    "memory": "memory_s",
    "own": "own_s",
    "copy": "copy_s",
    "setup": "setup_s",
}


def receipt(
    placement: Placement,
    *,
    policy: str,
    broken: Break | None = None,
    evicted_why: str = "usual",
    is_batch: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the receipt of a placement as JSON, with replicas in the order of the ranking.

    Args:
        policy: the routing policy. Costs are None with policies other than "kvroute".
        broken: where the prompt differs from the chat's earlier prompt; None: it does not.
        evicted_why: why blocks of the prompt were evicted, if some were.
        is_batch: whether the queue has chosen the replica for a batch request.
        limit: the most replicas to list, at least two; None: all.
    """
    ranking, evicted_tokens = placement.ranking, placement.evicted_tokens
    is_priced = ranking and policy == "kvroute"
    factors = None
    if is_priced:
        factors = prices(
            ranking,
            busy_s=placement.busy_s,
            pressure=placement.pressure,
            forks=placement.forks,
        )
    listed = ranking[:limit]
    terms = [terms_s(candidate, factors) for candidate in listed] if factors else []
    tiers = sorted({part.tier for candidate in listed for part in candidate.reloads})
    names = [name for name in TERMS if any(candidate.term(name) for candidate in listed)]
    return {
        "policy": policy,
        "lora": name_of(placement.variant) or None,
        "prompt_tokens": placement.prompt_tokens,
        "block_size": placement.block_size,
        "reusable_blocks": len(placement.chain),
        "best_hit_tokens": placement.best_hit_blocks * placement.block_size,
        "broken": broken and broken.as_json(known_tokens=placement.known_tokens),
        "evicted": {"tokens": evicted_tokens, "why": evicted_why} if evicted_tokens else None,
        "busy_s": round(placement.busy_s, 6),
        "congestion_price": round(factors.alpha, 3) if factors else None,
        "cache_pressure": round(placement.pressure, 3),
        "choice": ranking[0].replica_id if ranking else None,
        "runner_up": ranking[1].replica_id if len(ranking) > 1 else None,
        "reason": _reason(placement, terms, policy, is_batch=is_batch),
        "replicas": [
            _replica(candidate, candidate_terms, placement.block_size, tiers=tiers, names=names)
            for candidate, candidate_terms in zip_longest(listed, terms)
        ],
    }


def _replica(
    candidate: Candidate,
    terms: dict[str, float] | None,
    block_size: int,
    *,
    tiers: Sequence[Tier],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return one replica of a receipt.

    Args:
        terms: the terms of the replica's cost; None: the policy has no costs.
        tiers: the slower tiers from which at least one listed replica would get blocks.
        names: the terms of features that at least one listed replica has.
    """
    blocks = {part.tier: part.blocks for part in candidate.reloads}
    reload: dict[str, float] = {
        f"{tier.name}_tokens": blocks.get(tier, 0) * block_size for tier in tiers
    }
    if tiers:
        reload["reload_s"] = round(candidate.reload_s, 4)
    of_features: dict[str, Any] = {}
    for name in names:
        term = candidate.term(name)
        of_features[f"{name}_from"] = (term.source_id or None) if term else None
        of_features[f"{name}_s"] = round(term.seconds, 4) if term else 0.0
    if terms is not None:
        terms = terms | {name: terms.get(name, 0.0) for name in names}
        if not tiers:
            del terms["reload"]  # it is 0 on all listed replicas
    return {
        "id": candidate.replica_id,
        "hit_tokens": candidate.hit_blocks * block_size,
        **reload,
        **of_features,
        "backlog_s": round(candidate.backlog_s, 4),
        "prefill_s": round(candidate.own_s + candidate.copy_s, 4),
        "unanswered": candidate.unanswered,
        "free_blocks": candidate.free_blocks,
        "cost_s": round(sum(terms.values()), 4) if terms else None,
        "terms_s": {name: round(s, 4) for name, s in terms.items()} if terms else None,
    }


def _reason(
    placement: Placement, terms: Sequence[dict[str, float]], policy: str, *, is_batch: bool
) -> str:
    """Return the main reason of a placement as a sentence."""
    if not placement.ranking:
        return "no replica is ready"
    if is_batch:
        return "it costs least among the replicas with room for this batch request"
    if len(placement.ranking) < 2:
        return "no other replica may get this request at the moment"
    if not terms:
        return f"the policy {policy} ignores caches"
    choice, other = placement.ranking[:2]
    saved_s = {name: terms[1].get(name, 0.0) - terms[0].get(name, 0.0) for name in REASONS}
    name, seconds = max(saved_s.items(), key=itemgetter(1))
    if seconds <= 0:
        return (
            f"{other.replica_id} costs the same; this one has more free KV blocks, or was chosen "
            "at random"
        )
    return REASONS[name].format(
        other=other.replica_id,
        seconds=_duration(_seconds(other, name) - _seconds(choice, name)),
        tokens=placement.prompt_tokens,
        hits=choice.hit_blocks * placement.block_size,
        other_hits=other.hit_blocks * placement.block_size,
    )


def _seconds(candidate: Candidate, name: str) -> float:
    """Return a term's time before it is multiplied by its price; 0: it has only a price."""
    if name in SECONDS:
        return float(getattr(candidate, SECONDS[name]))
    term = candidate.term(name)
    return term.seconds if term else 0.0


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
