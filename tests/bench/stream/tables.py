"""The cost of a streamed token and of a short request, in CPU time and in latency.

A steady load of chats is sent to a cluster with simulated engines, and to SGLang's gateway with
servers that answer at once. The load runs on the same cores as the measured processes.
"""

from dataclasses import replace

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.report import Row, Section
from tests.bench.stream.cluster import serving
from tests.bench.stream.engine import alone
from tests.bench.stream.gateway import MISSING, gateway, is_installed, mock_engines
from tests.bench.stream.load import Cost, Load, idle_cpu_s, measure
from tests.bench.stream.served import served

REPLICAS = 2
DECODE_MS = 10.0
TOKENS = 200
STREAMED = [
    Load(model=BUILTIN_MODEL, concurrent=concurrent, tokens=TOKENS)
    for concurrent in (1, 16, 64, 256)
]
SHORT = [
    Load(model=BUILTIN_MODEL, concurrent=concurrent, tokens=1, streamed=False)
    for concurrent in (1, 16)
]
PAST_HAPROXY = (STREAMED[2], *SHORT)  # loads that are also sent directly to the router's port
WARM_UP = replace(STREAMED[1], window_s=3.0)
SHORT_WINDOW_S = 3.0  # length of the window if the costs vary less
IDLE_S = 3.0

FULL_REPLICAS = 4
FULL_DECODE_MS = 2.0
FULL = Load(model=BUILTIN_MODEL, concurrent=128, tokens=TOKENS)

OURS, PAST = "kvroute", "kvroute, past HAProxy"
PEER = "sglang-router"
ENGINE, MOCK = "simulated engine alone", "mock engine alone"
BEHIND = {OURS: ENGINE, PAST: ENGINE, PEER: MOCK}  # way -> the engines behind the router
ALONE = f"An engine alone has 1/{REPLICAS} of the streams or requests, as it has behind a router."
TOGETHER = (
    "A gap is the time between two events of a stream. It is about 0 for events that arrive "
    "together."
)
NAGLE = (
    f"The first token of {PEER} waits for the client's delayed ACK, 40 ms on Linux. A client that "
    "sends ACKs at once does not wait."
)

Costs = dict[tuple[str, Load], Cost]  # way of the requests, and load -> costs


def tables() -> list[Section]:
    costs: Costs = {
        (ENGINE, load): alone(_shortly(_share(load)), decode_ms=DECODE_MS)
        for load in STREAMED + SHORT
    }
    notes, waits = [ALONE, _cluster(costs)], [TOGETHER]
    if is_installed():
        _peer(costs)
        waits.append(NAGLE)
    else:
        notes.append(MISSING)
    title = f"Streamed chats of {TOKENS} tokens, {DECODE_MS:g} ms a token, {REPLICAS} replicas"
    streamed = [key for key in costs if key[1].streamed]
    short = [key for key in costs if not key[1].streamed]
    return [
        Section(f"{title}: CPU time", [_token(costs, *key) for key in streamed], notes),
        Section(f"{title}: at the client", [_waits(costs, *key) for key in streamed], waits),
        Section("Requests of one token", [_request(costs, *key) for key in short]),
        _full(),
        served(),
    ]


def _cluster(costs: Costs) -> str:
    """Measure the cluster and add its costs; return a text about its idle processes."""
    with serving(replicas=REPLICAS, decode_ms=DECODE_MS) as cluster:
        measure(cluster.port, WARM_UP, {})
        idle = idle_cpu_s(cluster.processes(), seconds=IDLE_S)
        for load in STREAMED + SHORT:
            costs[OURS, load] = measure(cluster.port, load, cluster.processes())
        if port := cluster.router_port:
            processes = {role: cluster.processes()[role] for role in ("router", "replica")}
            for load in PAST_HAPROXY:
                costs[PAST, load] = measure(port, load, processes)
    took = ", ".join(f"{role} {1000 * cpu_s:.1f}" for role, cpu_s in idle.items())
    return f"CPU ms a second of an idle cluster (all processes of a kind together): {took}."


def _peer(costs: Costs) -> None:
    with mock_engines(REPLICAS, step_s=DECODE_MS / 1000) as engines:
        engine_port = min(engines)
        for load in STREAMED + SHORT:
            processes = {"replica": [engines[engine_port]]}
            costs[MOCK, load] = measure(engine_port, _shortly(_share(load)), processes)
        with gateway([*engines]) as (port, pid):
            processes = {"router": [pid], "replica": [*engines.values()]}
            measure(port, WARM_UP, {})
            for load in STREAMED + SHORT:
                costs[PEER, load] = measure(port, _shortly(load), processes)


def _full() -> Section:
    """Measure a router while engines generate more tokens than it can forward."""
    with serving(replicas=FULL_REPLICAS, decode_ms=FULL_DECODE_MS) as cluster:
        measure(cluster.port, WARM_UP, {})
        rows = [_most(OURS, measure(cluster.port, FULL, cluster.processes()))]
    if is_installed():
        with (
            mock_engines(FULL_REPLICAS, step_s=FULL_DECODE_MS / 1000) as engines,
            gateway([*engines]) as (port, pid),
        ):
            measure(port, WARM_UP, {})
            processes = {"router": [pid], "replica": [*engines.values()]}
            rows.append(_most(PEER, measure(port, FULL, processes)))
    offered = FULL.concurrent * 1000 / FULL_DECODE_MS
    return Section(
        f"One router and too many tokens: {FULL_REPLICAS} replicas, {FULL.concurrent} streams",
        rows,
        [
            f"The engines would generate {offered:,.0f} tokens/s. If the router's share of a core "
            "is below 1, the rate in the last column was not reached: other processes used the "
            "rest of the core."
        ],
    )


def _share(load: Load) -> Load:
    """Return the part of the load for one replica."""
    return replace(load, concurrent=max(1, load.concurrent // REPLICAS))


def _shortly(load: Load) -> Load:
    return replace(load, window_s=SHORT_WINDOW_S)


def _token(costs: Costs, way: str, load: Load) -> Row:
    cost = costs[way, load]
    us = {role: 1e6 * cpu_s / cost.tokens for role, cpu_s in cost.cpu_s.items()}
    return {
        "way": way,
        "streams": load.concurrent,
        "tokens/s": cost.tokens / cost.seconds,
        "events a token": cost.events / cost.tokens,
        "router, us a token": us.get("router"),
        "replica, us a token of its own": us.get("replica"),
        "HAProxy, us a token": us.get("HAProxy"),
        f"router / {PEER}": _ratio(costs, way, load, "router", PEER),
        "replica / engine alone": _ratio(costs, way, load, "replica", ENGINE),
    }


def _waits(costs: Costs, way: str, load: Load) -> Row:
    cost = costs[way, load]
    return {
        "way": way,
        "streams": load.concurrent,
        "TTFT p50 ms": cost.ttft_p50_ms,
        "added TTFT p50 ms": _added_ms(costs, way, load),
        "gap p50 ms": cost.gap_p50_ms,
        "gap p99 ms": cost.gap_p99_ms,
        "answers": cost.answers,
    }


def _request(costs: Costs, way: str, load: Load) -> Row:
    cost = costs[way, load]
    us = {role: 1e6 * cpu_s / cost.answers for role, cpu_s in cost.cpu_s.items()}
    return {
        "way": way,
        "concurrent": load.concurrent,
        "requests/s": cost.answers / cost.seconds,
        "router, us a request": us.get("router"),
        "replica, us a request of its own": us.get("replica"),
        "HAProxy, us a request": us.get("HAProxy"),
        f"router / {PEER}": _ratio(costs, way, load, "router", PEER),
        "p50 ms": cost.ttft_p50_ms,
        "added p50 ms": _added_ms(costs, way, load),
        "p99 ms": cost.ttft_p99_ms,
    }


def _most(way: str, cost: Cost) -> Row:
    router_s = cost.cpu_s["router"]
    return {
        "way": way,
        "tokens/s": cost.tokens / cost.seconds,
        "events a token": cost.events / cost.tokens,
        "router's share of a core": router_s / cost.seconds,
        "tokens per CPU second of the router": cost.tokens / router_s,
    }


def _ratio(costs: Costs, way: str, load: Load, role: str, other: str) -> float | None:
    """Return the CPU time of a token divided by that of the other way.

    Returns None if `way` is not kvroute's, or if the other way was not measured with this load.
    """
    if way not in (OURS, PAST) or (other, load) not in costs:
        return None
    ours, theirs = costs[way, load], costs[other, load]
    return (ours.cpu_s[role] / ours.tokens) / (theirs.cpu_s[role] / theirs.tokens)


def _added_ms(costs: Costs, way: str, load: Load) -> float | None:
    """Return the milliseconds to first token in addition to those of the engine alone."""
    if way not in BEHIND:
        return None
    through, behind = costs[way, load].ttft_p50_ms, costs[BEHIND[way], load].ttft_p50_ms
    return None if through is None or behind is None else through - behind
