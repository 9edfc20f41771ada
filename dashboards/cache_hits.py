"""The dashboard Cache hits: the source of every prompt token, and the causes of missed hits."""

from dashboards import grafana
from dashboards.grafana import Dashboard, Panel, Query, Row
from dashboards.promql import in_range, on, per_second, replica, router, share

PROMPTS = router("kvroute_prompt_tokens_total")
SAVED = "kvroute_prefix_saved_tokens_total"
LEDGER = (  # from the prompt's start to its end, as in router/placement/ledger.py
    ("hit", "green"),
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
    "hit: cached, as expected. unexpected_hit: cached, not expected; see the index's age in the "
    "dashboard Routing. stale: expected, but evicted; see the publishers' lag. spilled: cached on "
    "another replica, mostly a busy one; more replicas. unpinned: of a named prefix that no "
    "replica kept; a larger `--pin-share`. partial: cached but for windows or states; "
    "`prefix_cache_retention_interval`. evicted: cached before, but not now; more memory for "
    "caches. broken: behind a place where a chat changed; `kvroute doctor` names it. new: never "
    "cached; let prompts begin alike. isolated: new, of a prompt with a `cache_salt`; fewer salts, "
    "if that is allowed. tail: not a full block; a smaller `--block-size`."
)


def of(*causes: str) -> str:
    return router("kvroute_prompt_tokens_total", f'cause=~"{"|".join(causes)}"')


def share_of(*causes: str) -> str:
    return share(f"sum ({in_range(of(*causes))})", f"sum ({in_range(PROMPTS)})")


def waterfall() -> tuple[Query, ...]:
    """From all prompt tokens down to the cached ones; each bar stands on the shares below it."""
    names = [cause for cause, _ in LEDGER]
    steps = {cause: f"{len(names) - i:02} {cause}" for i, cause in enumerate(names)}
    floors = (on(steps[cause], share_of(*names[:i])) for i, cause in enumerate(names) if i)
    return (
        Query(" or ".join(floors), "floor", "transparent"),
        *(
            Query(on(steps[cause], share_of(cause)), cause, color)
            for cause, color in reversed(LEDGER)
        ),
    )


CACHED = router("kvroute_prompt_tokens_total", 'cause=~"hit|unexpected_hit"')

SHARES = Row(
    "Shares of all prompt tokens",
    (
        Panel(
            "Delivered",
            "Share that came from a cache. The ledger below shows the causes of the rest.",
            grafana.FRACTION,
            (Query(share(per_second(CACHED), per_second(PROMPTS)), "delivered"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Reusable",
            "Were on the replica that had most of each prompt: the most that routing could "
            "deliver. Far above Delivered: see spilled and stale. Low itself: see new and "
            "evictions.",
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
            "Not computed",
            "Prompt tokens a second that a cache spared the engines. Should it fall while requests "
            "do not, the ledger says why.",
            grafana.TOKENS_PER_S,
            (Query(per_second(CACHED), "not computed"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Copies of a block",
            "How many replicas hold a block, on average. Near the number of replicas, their caches "
            "hold the same things, as with few and hot prefixes. If much is new or stale then, "
            "fewer prefixes should be pinned everywhere.",
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
WHERE = Row(
    "The ledger",
    (
        Panel(
            "Where prompt tokens came from",
            CAUSES,
            grafana.TOKENS_PER_S,
            tuple(Query(per_second(of(cause)), cause, color) for cause, color in LEDGER),
            stacking="percent",
            width=14,
        ),
        Panel(
            "From all prompt tokens down to those from a cache",
            "Shares in the whole time range; each step is a loss, and what is left was cached. The "
            "tallest step is where to begin. " + CAUSES,
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
            "What they saved",
            "Tokens of each that requests took from a cache, in the whole time range; the ten with "
            "most. One that should be here and is not: do requests name it, and is it warm? "
            "`GET /v1/prefixes/ID` says where.",
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
            "Pinned",
            "Share of what named prefixes may hold that they do hold. At 100% another declaration "
            "is a 409: raise `--pin-share`, drop a prefix, or declare it with `pinned: false`. "
            "`GET /v1/cluster/hot` says which ones earn their place.",
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
    return router("kvroute_evicted_prompt_tokens_total", f'why="{why}"')


def found_at(size: str) -> str:
    """Prompt tokens a second that caches of that size would have found."""
    ghosts = replica("kvroute_engine_ghost_hit_tokens_total", f'cache="{size}"')
    return f"({per_second(FOUND)} + {per_second(ghosts)})"


FOUND = replica("kvroute_engine_cached_tokens_total")
ASKED = replica("kvroute_engine_prompt_tokens_total")
EVICTION_REASONS = ("ended", "unlikely", "usual")  # as in router/sessions/returns.py

RETENTION = Row(
    "Retention",
    (
        Panel(
            "Lost to eviction",
            "Share of prompt tokens that were cached once, by why they are gone. ended: their "
            "session had, as its client said. unlikely: such turns seldom come back. usual: they "
            "were the next in turn, or their replica is gone; the next panel says what more memory "
            "would bring.",
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
            "What caches found, and an estimate of what larger ones would have. Lines far above "
            "`now`: more memory, or more replicas if requests wait. Lines together: neither helps.",
            grafana.FRACTION,
            (
                Query(share(per_second(FOUND), per_second(ASKED)), "now"),
                *(
                    Query(share(found_at(size), per_second(ASKED)), f"{size}x")
                    for size in ("1.25", "1.5", "2")
                ),
            ),
            width=12,
        ),
    ),
)


def found_in(tier: str) -> str:
    return router("kvroute_hit_prompt_tokens_total", f'tier="{tier}"')


def copied(metric: str, direction: str = "in|out") -> str:
    return replica(f"kvroute_engine_host_{metric}_total", f'direction=~"{direction}"')


TIERS = Row(
    "Tiers",
    (
        Panel(
            "Hits by tier",
            "Share of prompt tokens that came from a cache, by where it was: in GPU memory, or "
            "reloaded from host memory. Much evicted in the ledger beside a small share of host: a "
            "larger `--host-cache-gb`.",
            grafana.FRACTION,
            (
                Query(share(per_second(found_in("gpu")), per_second(PROMPTS)), "gpu", "green"),
                Query(share(per_second(found_in("host")), per_second(PROMPTS)), "host", "blue"),
            ),
            stacking="normal",
            width=6,
        ),
        Panel(
            "Reloaded tokens",
            "Prompt tokens a second that came from host memory, as the engines say it. Far above "
            "what Hits by tier has of host: the index is behind.",
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
            "Bytes a second. in: reloaded, which is what the tier is for. out: kept for later; "
            "much out and little in: what is asked for seldom comes back.",
            grafana.BYTES,
            (Query(per_second(copied("bytes"), "direction"), "{{direction}}"),),
            width=6,
        ),
        Panel(
            "Time spent on copies",
            "Share of the time in which a replica copied; near 100% of in, reloads wait for each "
            "other: more replicas, or nodes with faster links.",
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
            "Bytes that a second of copying brings back. One replica far below the others: its "
            "node's memory or link is shared with something else.",
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
            "Seconds of prefill that a second of all replicas together need not compute, less the "
            "waits for copies, as routers predict both. Near 0: what comes back is in GPU memory.",
            grafana.SECONDS,
            (Query(per_second(router("kvroute_host_saved_seconds_total")), "saved", "green"),),
            width=8,
        ),
        Panel(
            "Blocks in host memory",
            "KV blocks there. Once it does not grow any more, the tier is full: each new block "
            "pushes out another.",
            grafana.NUMBER,
            (Query(replica("kvroute_engine_host_blocks"), "{{replica}}"),),
            width=8,
        ),
    ),
)
REPLICAS = Row(
    "Replicas' caches",
    (
        Panel(
            "Hit share of each replica",
            "Share of the prompt tokens sent there that were cached there. One far below the "
            "others: its cache was cleared, it is new, or `kvroute doctor --audit` finds what it "
            "holds to differ from what the routers believe.",
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
            "Blocks a second that made room for others. Evictions are what a full cache does; "
            "together with much stale or new, the cache is too small for what is asked again.",
            grafana.BLOCKS_PER_S,
            (
                Query(
                    per_second(replica("kvroute_engine_evicted_blocks_total"), "replica"),
                    "{{replica}}",
                ),
            ),
        ),
        Panel(
            "How long a cache lasts",
            "Capacity over what is stored in a second: about as long as an unused block stays. "
            "Shorter than the pauses of your users' chats, these find nothing: more memory, more "
            "replicas, or named prefixes for what must stay.",
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
            "Blocks known of",
            "Different blocks in the whole fleet, as each router knows them. Routers that differ "
            "for more than seconds: see the index's age and loads in the dashboard Routing.",
            grafana.NUMBER,
            (Query(router("kvroute_mirror_blocks"), "router {{router}}"),),
        ),
        Panel(
            "Caches cleared, events lost",
            "Times a second that a cache was emptied, or that what happened in it did not reach "
            "its replica. After a clearing its hits begin anew. Lost events: the replica's machine "
            "has too few cores for what it does.",
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
    "Where every prompt token came from, and if it was not the cache, why.",
    (SHARES, WHERE, RETENTION, TIERS, PREFIXES, REPLICAS),
)
