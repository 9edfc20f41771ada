"""Checks whether the connections between routers and replicas are encrypted."""

from collections.abc import Iterator, Mapping, Sequence

from kvroute.doctor.checks import Check, Facts
from kvroute.local.ports import is_local
from kvroute.wording import plural

NAME = "encryption"
REMEDY = (
    "set --wire-tls (docs/security.md says how to switch it on in a running fleet), unless you "
    "trust everybody on this network"
)


def encryption(replicas: Mapping[str, Facts], nodes: Sequence[str] | None) -> Iterator[Check]:
    """Check whether routers and replicas send prompts over a network without encryption.

    Args:
        replicas: Replica -> `host`, at which routers connect to it, and `tls`, how this connection
            is encrypted ("off": not at all).
        nodes: The addresses of the cluster's nodes; None if they are unknown.
    """
    if not replicas:
        return
    plain = [replica["host"] for replica in replicas.values() if replica["tls"] == "off"]
    if not plain:
        yield Check(NAME, "ok", "the connections between routers and replicas use TLS")
        return
    addresses = {*plain, *(nodes or ())}
    if all(map(is_local, plain)) or (nodes and len(addresses) == 1):
        finding = (
            f"routers reach replicas at {' and '.join(sorted({*plain}))}, on their own machine, so "
            "no network carries what they send"
        )
        yield Check(NAME, "ok", finding)
    elif len(addresses) > 1:
        finding = (
            f"the connections to {len(plain)} of {plural(len(replicas), 'replica')} are not "
            f"encrypted, and the cluster has nodes at {len(addresses)} addresses: everybody "
            "who can read their network can read prompts and answers"
        )
        yield Check(NAME, "warning", finding, REMEDY)
