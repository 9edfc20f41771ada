"""The dashboard Cache hits: the source of every prompt token, and the causes of missed hits."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import in_category, in_range, per_second, replica, router, share

PROMPTS = router("kvroute_prompt_tokens_total")
SAVED = "kvroute_prefix_saved_tokens_total"
# The ledger counts each prompt token under one cause (router/placement/ledger.py). The causes and
# their colours, in the order of the tokens in a prompt.
LEDGER = (
    ("hit", "green"),
    ("pulled", "dark-green"),
    ("disk", "super-light-green"),
    ("unexpected_hit", "light-green"),
    ("stale", "red"),
    ("spilled", "orange"),
    ("unpinned", "yellow"),
    ("partial", "light-orange"),
    ("evicted", "dark-orange"),
    ("broken", "dark-yellow"),
    ("new", "blue"),
    ("isolated", "purple"),
    ("tail", "gray"),
)
CAUSES = (
    "hit: cached, as expected. pulled: copied from another replica's host memory. disk: read from "
    "the disk cache. unexpected_hit: cached, but not expected; see the age of the index in the "
    "dashboard Routing. stale: expected, but no longer cached; see the publishing lag. "
    "spilled: cached on another replica, which was usually busy; add replicas. unpinned: part of a "
    "named prefix that no replica had cached; set a larger `--pin-share`. partial: cached, except "
    "in layers with a sliding window or a state; set vLLM's `prefix_cache_retention_interval`. "
    "evicted: cached earlier, but no longer; add memory for caches. broken: after a changed place "
    "in the earlier part of a chat; `kvroute doctor` shows the place. new: never cached; let "
    "prompts start with the same text. isolated: new, in a prompt with a `cache_salt`; use fewer "
    "salts if possible. tail: tokens at the end that fill no block; set a smaller `--block-size`."
)


def prompt_tokens(*causes: str) -> str:
    """Return the counter of prompt tokens with one of these causes."""
    return router("kvroute_prompt_tokens_total", f'cause=~"{"|".join(causes)}"')


def share_of(*causes: str) -> str:
    """Return the share of prompt tokens with one of these causes, in the whole time range."""
    return share(f"sum ({in_range(prompt_tokens(*causes))})", f"sum ({in_range(PROMPTS)})")


def waterfall() -> tuple[Query, ...]:
    """Return the queries of the waterfall from all prompt tokens to the cached ones.

    The bar of a cause stands on the sum of the shares of the earlier causes in LEDGER.
    """
    names = [cause for cause, _ in LEDGER]
    steps = {cause: f"{len(names) - i:02} {cause}" for i, cause in enumerate(names)}
    floors = (in_category(steps[cause], share_of(*names[:i])) for i, cause in enumerate(names) if i)
    return (
        Query(" or ".join(floors), "floor", "transparent"),
        *(
            Query(in_category(steps[cause], share_of(cause)), cause, color)
            for cause, color in reversed(LEDGER)
        ),
    )


CACHED = router("kvroute_prompt_tokens_total", 'cause=~"hit|pulled|disk|unexpected_hit"')

SHARES = Row(
    "Shares of all prompt tokens",
    (
        Panel(
            "Delivered hits",
            "Share of prompt tokens that came from a cache. The ledger below shows why the other "
            "tokens were computed.",
            grafana.FRACTION,
            (Query(share(per_second(CACHED), per_second(PROMPTS)), "delivered"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Reusable",
            "Share of prompt tokens that would come from a cache if each request went to the "
            "replica with its longest cached prefix. If it is far above Delivered hits, see "
            "spilled and stale in the ledger. If it is low itself, see new and evicted.",
            grafana.FRACTION,
            (
                Query(
                    share(per_second(router("kvroute_reusable_tokens_total")), per_second(PROMPTS)),
                    "reusable",
                ),
            ),
            kind="stat",
            width=6,
        ),
        Panel(
            "Saved prefill",
            "Prompt tokens per second that came from a cache, so that no engine had to compute "
            "them. If the number falls and the number of requests does not, the ledger shows the "
            "cause.",
            grafana.TOKENS_PER_S,
            (Query(per_second(CACHED), "not computed"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Copies of a block",
            "Mean number of replicas that have cached the same block. If it is near the number of "
            "replicas, all caches have the same blocks, as with a few hot prefixes. If the ledger "
            "also shows many new or stale tokens, pin fewer prefixes on all replicas.",
            grafana.NUMBER,
            (
                Query(
                    f"sum by (model) ({router('kvroute_publisher_blocks')}) / "
                    f"(max by (model) ({router('kvroute_mirror_blocks')}) > 0)",
                    "{{model}}",
                ),
            ),
            kind="stat",
            width=6,
        ),
    ),
    height=4,
)
LEDGER_ROW = Row(
    "The ledger",
    (
        Panel(
            "Prompt tokens by cause",
            CAUSES,
            grafana.TOKENS_PER_S,
            tuple(Query(per_second(prompt_tokens(cause)), cause, color) for cause, color in LEDGER),
            stacking="percent",
            width=14,
        ),
        Panel(
            "From all prompt tokens to cache hits",
            "Shares of the prompt tokens in the whole time range. Each step down is one cause of "
            "misses; the tokens that remain came from a cache. Start with the largest step. "
            + CAUSES,
            grafana.FRACTION,
            waterfall(),
            kind="waterfall",
            width=10,
        ),
    ),
    height=11,
)
PREFIXES = Row(
    "Named prefixes",
    (
        Panel(
            "Saved tokens",
            "Tokens of each named prefix that requests reused in the whole time range; the ten "
            "prefixes with the most tokens. If a prefix is missing, check that requests name it "
            "and that it is warm: `GET /v1/prefixes/ID` shows where it is.",
            grafana.TOKENS,
            (
                Query(
                    f"topk (10, sum by (prefix) ({in_range(router(SAVED))}))",
                    "{{prefix}}",
                ),
            ),
            kind="bargauge",
        ),
        Panel(
            "Pin capacity in use",
            "Pinned blocks of named prefixes, as a share of the blocks that pins may take. At "
            "100%, the next declaration gets a 409: raise `--pin-share`, drop a prefix, or declare "
            "the new one with `pinned: false`. `kvroute prefixes list` shows what each prefix "
            "saves.",
            grafana.FRACTION,
            (
                Query(
                    share(
                        replica("kvroute_engine_pinned_blocks"),
                        replica("kvroute_engine_pin_capacity_blocks"),
                    ),
                    "{{replica}}",
                ),
            ),
        ),
    ),
)


def lost(why: str) -> str:
    """Return the counter of evicted prompt tokens with this reason."""
    return router("kvroute_evicted_prompt_tokens_total", f'why="{why}"')


def hits_at(size: str) -> str:
    """Return the prompt tokens per second that caches of this relative size would have had.

    These are the real hits, plus the additional ones that replicas estimate (replica/ghosts.py).
    """
    ghosts = replica("kvroute_engine_ghost_hit_tokens_total", f'cache="{size}"')
    return f"({per_second(CACHED_TOKENS)} + {per_second(ghosts)})"


CACHED_TOKENS = replica("kvroute_engine_cached_tokens_total")
PROMPT_TOKENS = replica("kvroute_engine_prompt_tokens_total")
EVICTION_REASONS = (
    "ended",
    "unlikely",
    "usual",
)  # EVICTION_REASONS in kvroute/contract/keep.py

RETENTION = Row(
    "Retention",
    (
        Panel(
            "Lost to eviction",
            "Share of prompt tokens that had been cached and were evicted, by reason. ended: the "
            "client had ended the session. unlikely: conversations of this kind seldom continue. "
            "usual: the blocks were the least recently used, or their replica was lost. The next "
            "panel shows what more memory would change.",
            grafana.FRACTION,
            tuple(
                Query(share(per_second(lost(why)), per_second(PROMPTS)), why)
                for why in EVICTION_REASONS
            ),
            stacking="normal",
            width=12,
        ),
        Panel(
            "Hit share with larger caches",
            "Hit share of the real caches (`now`), and estimates for larger caches. If the "
            "estimates are far above `now`, add memory, or add replicas if requests wait. If all "
            "lines are close together, neither helps.",
            grafana.FRACTION,
            (
                Query(share(per_second(CACHED_TOKENS), per_second(PROMPT_TOKENS)), "now"),
                *(
                    Query(share(hits_at(size), per_second(PROMPT_TOKENS)), f"{size}x")
                    for size in ("1.25", "1.5", "2")
                ),
            ),
            width=12,
        ),
    ),
)


def hits_in(tier: str) -> str:
    """Return the counter of prompt tokens that came from this tier: gpu or host memory."""
    return router("kvroute_hit_prompt_tokens_total", f'tier="{tier}"')


def copied(metric: str, direction: str = "in|out") -> str:
    """Return a counter of copies between GPU memory and host memory."""
    return replica(f"kvroute_engine_host_{metric}_total", f'direction=~"{direction}"')


TIERS = Row(
    "Tiers",
    (
        Panel(
            "Hits by tier",
            "Share of prompt tokens that came from a cache, by tier: from GPU memory, reloaded "
            "from host memory, or pulled from another replica (peer). If the ledger shows many "
            "evicted tokens and the share of host is small, set a larger `--host-cache-gb`.",
            grafana.FRACTION,
            (
                Query(share(per_second(hits_in("gpu")), per_second(PROMPTS)), "gpu", "green"),
                Query(share(per_second(hits_in("host")), per_second(PROMPTS)), "host", "blue"),
                Query(share(per_second(hits_in("peer")), per_second(PROMPTS)), "peer", "purple"),
            ),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Reloaded tokens",
            "Prompt tokens per second that came from host memory, as counted by the engines. If "
            "they are far more than the routers count as host in Hits by tier, the index is late: "
            "see its age in the dashboard Routing.",
            grafana.TOKENS_PER_S,
            (
                Query(
                    per_second(replica("kvroute_engine_reloaded_tokens_total"), "replica"),
                    "{{replica}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Copied to and from host memory",
            "Bytes per second. in: blocks that were reloaded, which is the purpose of the tier. "
            "out: blocks that were stored for later. If much is stored and little reloaded, most "
            "prompts are not repeated: the tier helps little.",
            grafana.BYTES,
            (Query(per_second(copied("bytes"), "direction"), "{{direction}}"),),
            width=6,
        ),
        Panel(
            "Time spent on copies",
            "Share of the time that a replica spends on copies. in: from host memory. out: to host "
            "memory. If `in` is near 100%, reloads wait for each other: add replicas, or use nodes "
            "with faster links to the GPU.",
            grafana.FRACTION,
            (
                Query(
                    per_second(copied("seconds"), "replica, direction"), "{{replica}} {{direction}}"
                ),
            ),
            width=6,
        ),
        Panel(
            "Speed of reloads",
            "Bytes copied from host memory per second of copying. If one replica is far below the "
            "others, other programs use the memory of its node, or its link to the GPU.",
            grafana.BYTES,
            (
                Query(
                    share(
                        per_second(copied("bytes", "in"), "replica"),
                        per_second(copied("seconds", "in"), "replica"),
                    ),
                    "{{replica}}",
                ),
            ),
            width=8,
        ),
        Panel(
            "Time saved by host memory",
            "Predicted seconds of prefill that hits in host memory save per second on all "
            "replicas, minus the predicted waits for copies. If it is near 0, most hits are in GPU "
            "memory: the tier is not needed.",
            grafana.SECONDS,
            (Query(per_second(router("kvroute_host_saved_seconds_total")), "saved", "green"),),
            width=8,
        ),
        Panel(
            "Blocks in host memory",
            "Number of KV blocks in host memory. When it stops growing, the tier is full: each "
            "new block evicts another block.",
            grafana.NUMBER,
            (Query(replica("kvroute_engine_host_blocks"), "{{replica}}"),),
            width=8,
        ),
    ),
)
PULLS = Row(
    "Pulls between replicas",
    (
        Panel(
            "Pulls by result",
            "Pulls per second. If many are late, the network is slower than the replicas have "
            "measured. If many are lost or refused, see the logs of the replicas.",
            grafana.NUMBER,
            (Query(per_second(router("kvroute_pulls_total"), "result"), "{{result}}"),),
            width=6,
        ),
        Panel(
            "Speed of pulls",
            "Bytes per second of pulling, as the mean over all links. If it is far below the "
            "network's speed, other traffic uses the network, or replicas are short of CPU.",
            grafana.BYTES,
            (
                Query(
                    share(
                        per_second(router("kvroute_pulled_bytes_total")),
                        per_second(router("kvroute_pull_seconds_total")),
                    ),
                    "speed",
                    "blue",
                ),
            ),
            width=6,
        ),
        Panel(
            "Time saved by pulls",
            "Predicted seconds of prefill that pulled blocks save per second on all replicas, "
            "minus the times of the pulls. If it is near 0, pulls are not needed.",
            grafana.SECONDS,
            (Query(per_second(router("kvroute_peer_saved_seconds_total")), "saved", "green"),),
            width=6,
        ),
        Panel(
            "Conversations of removed replicas",
            "Conversations per second whose replica was removed. moved: another replica has "
            "pulled the blocks. If many are late, set a larger `--hand-over-s`.",
            grafana.NUMBER,
            (
                Query(
                    per_second(router("kvroute_handed_over_prompts_total"), "result"),
                    "{{result}}",
                ),
            ),
            width=6,
        ),
    ),
)
REPLICAS = Row(
    "Replicas' caches",
    (
        Panel(
            "Hit share of each replica",
            "Share of the prompt tokens sent to a replica that it had cached. If one replica is "
            "far below the others, it is new, or its cache was cleared, or routers have wrong "
            "information about it: run `kvroute doctor --audit`.",
            grafana.FRACTION,
            (
                Query(
                    share(
                        per_second(replica("kvroute_engine_cached_tokens_total"), "replica"),
                        per_second(replica("kvroute_engine_prompt_tokens_total"), "replica"),
                    ),
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Blocks evicted",
            "Blocks evicted per second to make space for new blocks. Evictions are normal for a "
            "full cache. If many tokens are evicted or stale in the ledger as well, the cache is "
            "too small for the prompts that are repeated.",
            grafana.BLOCKS_PER_S,
            (
                Query(
                    per_second(replica("kvroute_engine_evicted_blocks_total"), "replica"),
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Lifetime of an unused block",
            "Capacity divided by the blocks stored per second: about the time after which an "
            "unused block is evicted. If it is shorter than the pauses in your users' chats, "
            "their next turns find no cached blocks: add memory or replicas, or declare important "
            "prompts as named prefixes.",
            grafana.SECONDS,
            (
                Query(
                    share(
                        f"sum by (replica) ({replica('kvroute_engine_capacity_blocks')})",
                        per_second(replica("kvroute_engine_stored_blocks_total"), "replica"),
                    ),
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "Blocks in the index",
            "Number of different blocks in the whole fleet that each router knows. If routers "
            "differ for more than seconds, see the age of the index in the dashboard Routing.",
            grafana.NUMBER,
            (Query(router("kvroute_mirror_blocks"), "router {{router}}"),),
        ),
        Panel(
            "Caches cleared, events lost",
            "How often per second a cache was cleared, or an engine's events did not reach its "
            "replica. After a clearing, hits start again from 0. If events are lost, the "
            "replica's node has too few CPU cores.",
            grafana.NUMBER,
            (
                Query(
                    per_second(replica("kvroute_engine_cache_clears_total"), "replica"),
                    "{{replica}} cleared",
                ),
                Query(
                    per_second(replica("kvroute_engine_event_losses_total"), "replica"),
                    "{{replica}} events lost",
                ),
            ),
        ),
    ),
)

CACHE_HITS = Dashboard(
    "kvroute-cache-hits",
    "kvroute / Cache hits",
    "Where each prompt token came from, and why tokens were not cached.",
    (SHARES, LEDGER_ROW, RETENTION, TIERS, PULLS, PREFIXES, REPLICAS),
)
