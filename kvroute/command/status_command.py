"""The command `kvroute status`."""

from collections.abc import Iterator
from typing import Any

from kvroute.client import FIND, Url, call
from kvroute.command.tables import Column, number, plain_console, print_lines, print_table, seconds
from kvroute.doctor.fleet_checks import ready
from kvroute.features import FEATURES
from kvroute.store.connection import WITHOUT_REDIS

# What a router says of itself from the first Ctrl-C in the terminal of `kvroute serve`.
STOPPING = "the cluster finishes its running answers, refuses new requests, and then ends"

Facts = dict[str, Any]  # the response of GET /v1/cluster, or a part of it


def status(url: Url = FIND) -> None:
    """Show a running cluster: cache hits, times to first token, queues and replicas."""
    cluster, console = call("GET", url, "/v1/cluster"), plain_console()
    version = cluster.get("version")
    console.print(f"{url}: kvroute {version}" if version else url, soft_wrap=True)
    problems = {
        "STOPPING": STOPPING if cluster.get("stopping") else "",
        "REDIS": _redis_problem(cluster.get("index")),
    }
    if shown := [(name, problem) for name, problem in problems.items() if problem]:
        console.print()
        print_lines(shown)
    models = dict.fromkeys(part["model"] for part in (*cluster["queues"], *cluster["replicas"]))
    for model in models:
        console.print()
        print_lines([*_lines(model, cluster)])
        console.print()
        print_table(*_replicas(_entries(model, cluster, "replicas")))


def _redis_problem(index: Facts | None) -> str:
    """Return what is wrong with Redis, or "" if it is well or unknown."""
    if index is None or (index["reachable"] and index["writable"]):
        return ""
    what = "refuses writes" if index["reachable"] else f"has not answered for {index['age_s']} s"
    return f"{what}; {WITHOUT_REDIS}; kvroute doctor says what to do"


def _entries(model: str, cluster: Facts, part: str) -> list[Facts]:
    """Return the entries of one model in a list of the response, such as `replicas`."""
    return [entry for entry in cluster.get(part, ()) if entry["model"] == model]


def _lines(model: str, cluster: Facts) -> Iterator[tuple[str, str]]:
    yield "model", model
    for recent in _entries(model, cluster, "recent"):
        yield from _recent(recent)
    for queue in _entries(model, cluster, "queues"):
        yield "queue", queued(queue)
    for feature in FEATURES:
        for state in _entries(model, cluster, feature.name):
            yield from feature.lines(state)
    for fleet in _entries(model, cluster, "fleets"):
        yield "replicas", ready(fleet)
    replicas = _entries(model, cluster, "replicas")
    if parsers := {*map(_parsers, replicas)} - {""}:
        yield "parsers", "; ".join(sorted(parsers))
    for replica in replicas:
        if reason := replica["degraded"]:
            yield "DEGRADED", f"the cache of {replica['id']} is ignored: {reason}"
    if others := [replica["id"] for replica in replicas if replica.get("state") == "elsewhere"]:
        yield (
            "others",
            f"{', '.join(others)}: replicas of another deployment with the same --cluster",
        )
    for lost in _entries(model, cluster, "servers"):
        yield "LOST", f"your server {lost['problem']}"
    for reason in sorted({replica.get("unfit", "") for replica in replicas} - {""}):
        yield "vLLM", f"kvroute's changes do not fit the installed version: {reason}"


def _recent(recent: Facts) -> Iterator[tuple[str, str]]:
    """Yield lines about the recent requests of the router that has answered."""
    period = f"in the last {recent['window_s'] / 60:.0f} minutes, at the router that answered"
    if recent["window_s"] < 90:
        period = f"in the last {recent['window_s']:.0f} s, at the router that answered"
    yield "requests", f"{recent['requests_per_s']:,.2f}/s {period}"
    if tokens := recent["prompt_tokens"]:
        share = recent["cached_tokens"] / tokens
        yield "hit share", f"{share:.1%} of {tokens:,} prompt tokens came from the cache"
    if recent["ttft_p50_s"] is not None:
        p50, p90 = seconds(recent["ttft_p50_s"]), seconds(recent["ttft_p90_s"])
        yield "first token", f"after {p50} (p50), {p90} (p90)"
    if recent.get("tpot_p50_s") is not None:  # routers of older versions do not have it
        p50, p90 = seconds(recent["tpot_p50_s"]), seconds(recent["tpot_p90_s"])
        yield "next tokens", f"every {p50} (p50), {p90} (p90), in the mean of an answer"


def queued(queue: Facts) -> str:
    """Return a sentence: how many requests wait for a replica, and for how long."""
    everywhere = queue["all_routers"]
    if not everywhere["requests"]:
        return "no request waits for a replica"
    return (
        f"{everywhere['requests']:,} requests wait for a replica, with "
        f"{everywhere['prefill_s']:.1f} s of prefill; {queue['requests']:,} of them at the router "
        f"that answered, the oldest for {queue['oldest_s']:.1f} s"
    )


def _replicas(replicas: list[Facts]) -> tuple[list[Column], list[list[str]]]:
    has_servers = any(replica.get("server") for replica in replicas)
    columns = [
        *(
            Column("replica"),
            Column("state"),
            Column("node, or\nyour server" if has_servers else "node"),
            number("cached\nblocks"),
            number("of\nblocks"),
        ),
        *(number("running\nrequests"), number("waiting\nrequests")),
    ]
    rows = [
        [
            replica["id"],
            replica.get("state", "?"),
            replica.get("server") or replica["node"],
            "?" if replica["blocks"] is None else f"{replica['blocks']:,}",
            f"{replica['capacity_blocks'] + replica.get('host', {}).get('blocks', 0):,}",
            f"{replica['running']:,}",
            f"{replica['waiting']:,}",
        ]
        for replica in replicas
    ]
    return columns, rows


def _parsers(replica: Facts) -> str:
    """Return the parsers that vLLM uses for the replica's model, or ""."""
    parsers = {"tool calls": replica["tool_parser"], "reasoning": replica["reasoning_parser"]}
    return ", ".join(f"{parser} for {part}" for part, parser in parsers.items() if parser)
