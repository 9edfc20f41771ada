"""The doctor's check of the links over which replicas pull blocks from each other."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvroute.doctor.checks import Check
from kvroute.wording import plural

SLOW_LINK = "no blocks are pulled over this link; use a faster network, or set --pull off"


def pulls(links: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Check for links over which replicas pull blocks more slowly than they compute them.

    Args:
        links: Replica that pulls -> the speed of its slowest link (peer_pulls.py: PullRate).
    """
    slow = {id_: link for id_, link in links.items() if link["pull_s"] >= link["computing_s"]}
    for replica_id, link in slow.items():
        finding = f"replica {replica_id} pulls blocks at {_gb_per_s(link)}: {link['tokens']:,} "
        finding += (
            f"tokens take {link['pull_s']:.2g} s, and computing them {link['computing_s']:.2g} s"
        )
        yield Check("pulls", "warning", finding, SLOW_LINK)
    if links and not slow:
        slowest = min(links.values(), key=lambda link: link["bytes_per_s"])
        finding = (
            f"{plural(len(links), 'replica')} can pull blocks, at {_gb_per_s(slowest)} or more"
        )
        yield Check("pulls", "ok", finding)


def _gb_per_s(link: Mapping[str, Any]) -> str:
    return f"{link['bytes_per_s'] / 1e9:.2g} GB/s"
