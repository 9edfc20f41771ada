"""`kvroute doctor`: what is wrong with a running cluster, and what to do about it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from router.client import LOCAL, Url

WAIT_S = 60.0  # for an answer; an audit asks every replica

ACCOUNTS = {"engine": "the engine", "replica": "the replica", "redis": "Redis"}  # and a router's
HEALS = "ask again: what can heal has healed within seconds; if it stays, restart the replica"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    is_ok: bool
    finding: str
    remedy: str = ""  # empty where nothing is wrong


def doctor(
    url: Url = LOCAL,
    audit: Annotated[
        bool, typer.Option("--audit", help="Compare engines, replicas, Redis and a router.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Examine a running cluster; exit code 1 when something is wrong."""
    checks = list(examine(url, audit=audit))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        Console().print(_table(checks))
    raise typer.Exit(0 if all(check.is_ok for check in checks) else 1)


def examine(url: str, *, audit: bool) -> Iterator[Check]:
    """One check after another, as far as the cluster answers."""
    try:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            ready = int(client.get("/health").json()["replicas"])
            yield _health(ready)
            if ready and audit:
                yield from _audit(client, ready)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        finding = f"no kvroute answers at {url} ({error})"
        yield Check("cluster", False, finding, "start one (kvroute serve), or write another --url")


def _health(ready: int) -> Check:
    if ready:
        return Check("cluster", True, f"{ready} replicas are ready")
    return Check("cluster", False, "no replica is ready", "see the output of kvroute serve")


def _audit(client: httpx.Client, ready: int) -> Iterator[Check]:
    answer = client.get("/v1/cluster/audit")
    if answer.status_code == 503:
        yield Check("audit", False, answer.json()["error"]["message"], "see to Redis")
        return
    found = answer.raise_for_status().json()
    yield _index(len(found["replicas"]), ready)
    for replica in found["replicas"]:
        yield judge(replica, found["router"])


def _index(listed: int, ready: int) -> Check:
    finding = f"{listed} replicas are in it, {ready} are ready"
    if listed >= ready:  # one that died is in it until its lease ends
        return Check("index", True, finding)
    return Check("index", False, finding, "see to Redis: nothing is known of the others' caches")


def judge(replica: dict[str, Any], router: str) -> Check:
    """What an audit by that router says of one replica."""
    who = ACCOUNTS | {"mirror": f"router {router}"}
    counts = [
        f"{who[account]} {'?' if count is None else count}"
        for account, count in replica["blocks"].items()
    ]
    wrong = [
        f"no answer from {who[account]}" if count is None else f"drift of {count} in {who[account]}"
        for account, count in replica["drift"].items()
        if count != 0
    ]
    finding = f"{', '.join(wrong) or 'no drift'}; blocks: {', '.join(counts)}"
    return Check(f"audit of {replica['id']}", not wrong, finding, HEALS if wrong else "")


def _table(checks: list[Check]) -> Table:
    table = Table("check", "", "finding", "what to do")
    for check in checks:
        table.add_row(check.name, "ok" if check.is_ok else "wrong", check.finding, check.remedy)
    return table
