"""What a router or a replica learns from whatever has started it.

Ray Serve starts them on the machines of a cluster (serve_surroundings.py). `kvroute attach` runs a
router and everything that it needs in one process, without Ray.
"""

from typing import Any, Protocol


class Surroundings(Protocol):
    """The place where a router or a replica runs."""

    @property
    def address(self) -> str:
        """Return the address of this machine, at which other processes reach this one."""
        ...

    @property
    def cluster_address(self) -> str:
        """Return an address that only the processes of this cluster share."""
        ...

    @property
    def application(self) -> str:
        """Return the name of the application that this process belongs to."""
        ...

    async def draining(self) -> None:
        """Wait until this process gets no new requests, because it will end."""
        ...

    def log(self, model: str | None) -> None:
        """Write all further log records of this process where users look for them.

        Args:
            model: The model name that clients send; None: several models.
        """
        ...

    async def facts(self, port: int) -> dict[str, Any]:
        """Return what `kvroute doctor` asks about the processes and machines of the cluster.

        Args:
            port: The port that received the request.

        Returns:
            host: the address that the HTTP endpoint listens on; None: it is unknown.
            nodes: the addresses of the machines; None: they are unknown.
            serve: facts about Ray Serve; None: there is none.
        """
        ...
