"""The time of a routing decision and of its parts, compared with other routers, in ms (median)."""

import statistics
from collections.abc import Sequence

from kvroute.router.placement.fleet import Fleet
from tests.bench import peers
from tests.bench.indexed import BLOCK, PROMPT_TOKENS, REPLICAS, Tokens, fleet, prompt
from tests.bench.report import Row, Section, each_s

ROUNDS = 51
NOW_S = 300.0  # current time on the clock of the running requests


def decision() -> Section:
    ours = fleet()
    dynamo = peers.Dynamo() if peers.has_dynamo() else None
    tree = peers.RayPrefixTree() if peers.has_ray_llm() else None
    missing = [
        note for note, peer in ((peers.NO_DYNAMO, dynamo), (peers.NO_RAY, tree)) if peer is None
    ]
    rows = [row(ours, prompt(tokens), dynamo, tree) for tokens in PROMPT_TOKENS]
    title = (
        f"One decision in ms, {len(ours.mirror):,} blocks of {BLOCK} on {len(REPLICAS)} replicas"
    )
    return Section(title, rows, notes=missing)


def row(ours: Fleet, tokens: Tokens, dynamo: peers.Peer | None, tree: peers.Peer | None) -> Row:
    chain = ours.caches.chain(tokens)
    placed = ours.place(tokens, REPLICAS, NOW_S)
    assert placed.best_hit_blocks == len(tokens) // 2 // BLOCK
    fingerprint_ms = median_ms(each_s(lambda: ours.caches.chain(tokens), ROUNDS))
    lookup_ms = median_ms(each_s(lambda: ours.mirror.hits(chain), ROUNDS))
    whole_ms = median_ms(each_s(lambda: ours.place(tokens, REPLICAS, NOW_S), ROUNDS))
    dynamo_ms = median_ms(dynamo.each_s(tokens, ROUNDS)) if dynamo else None
    tree_ms = median_ms(tree.each_s(tokens, ROUNDS)) if tree else None
    return {
        "prompt tokens": len(tokens),
        "fingerprint": fingerprint_ms,
        "look up": lookup_ms,
        "rank": whole_ms - fingerprint_ms - lookup_ms,
        "whole": whole_ms,
        "SelectionService.select": dynamo_ms,
        "ours / SelectionService": dynamo_ms and whole_ms / dynamo_ms,
        "PrefixTree.prefix_match": tree_ms,
        "ours / PrefixTree": tree_ms and whole_ms / tree_ms,
    }


def median_ms(times_s: Sequence[float]) -> float:
    return 1000 * statistics.median(times_s)
