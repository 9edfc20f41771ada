"""Containers for tests, each with an address of its own on a network that the test can reach."""

import json
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.hosts import MAC, free_network, ip
from tests.support.images import Images, limits
from tests.support.waiting import wait_until

START_S = 900.0  # on a busy machine, the first start takes minutes
HOSTNAME = "--hostname"  # option of `podman run`; Docker and Kubernetes make the name known, too
NO_DNS = "--dns=127.0.0.1"  # nothing listens there, so that other names are unknown at once


@dataclass(frozen=True)
class Container:
    """A container that was started."""

    images: Images
    name: str
    address: str

    @property
    def url(self) -> str:
        """Address of kvroute's endpoint in it."""
        return f"http://{self.address}:8000"

    def logs(self) -> str:
        """Return what its processes have printed."""
        command = [*self.images.podman, "logs", self.name]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
        return done.stdout

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it."""
        words = [*self.images.podman, "exec", self.name, *command]
        return subprocess.run(words, capture_output=True, text=True)

    def state(self) -> dict[str, Any]:
        """Return its state as podman describes it."""
        (described,) = json.loads(self.images.run("container", "inspect", self.name))
        state: dict[str, Any] = described["State"]
        return state

    def wait_for_health(self) -> None:
        """Wait until kvroute answers in it that it is well."""

        def is_well() -> bool:
            state = self.state()
            assert state["Running"], f"ended with {state['ExitCode']}:\n{self.logs()}"
            with suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            return False

        wait_until(is_well, within_s=START_S)

    def stop(self, grace_s: int) -> int:
        """Stop it as `docker stop` does; return its exit code."""
        self.images.run("stop", "--time", str(grace_s), self.name)
        return int(self.state()["ExitCode"])


@dataclass
class ContainerNetwork:
    """A switch with containers on it. The test process has the first address."""

    images: Images
    bridge: str
    prefix: str
    containers: list[Container] = field(default_factory=list)

    def start(
        self,
        image: str,
        *options: str,
        command: tuple[str, ...] = (),
        hosts: Mapping[str, Container] | None = None,
    ) -> Container:
        """Start a container.

        Args:
            image: The image.
            options: Options of `podman run`.
            command: The command, if it is not the image's own.
            hosts: Names of other containers that it can use.
        """
        number = len(self.containers) + 2
        container = Container(
            self.images, f"{self.bridge}-{secrets.token_hex(4)}", f"{self.prefix}{number}"
        )
        self.containers.append(container)
        self._connect(container, f"{self.bridge}p{number}")
        named = {name: other.address for name, other in (hosts or {}).items()}
        if HOSTNAME not in options:
            options = (HOSTNAME, container.name, *options)
        named[options[options.index(HOSTNAME) + 1]] = container.address
        names = [f"--add-host={name}:{address}" for name, address in named.items()]
        network = f"--network=ns:/run/netns/{container.name}"
        given = ("--detach", "--name", container.name, network, NO_DNS, *names)
        self.images.run("run", *given, *limits(), *options, image, *command)
        return container

    def start_beside(
        self, other: Container, image: str, *options: str, command: tuple[str, ...]
    ) -> Container:
        """Start a container that uses the network of another one."""
        container = Container(self.images, f"{other.name}-{secrets.token_hex(4)}", other.address)
        network = f"--network=container:{other.name}"
        given = ("--detach", "--name", container.name, network, *limits(), *options)
        self.images.run("run", *given, image, *command)
        self.containers.append(container)
        return container

    def _connect(self, container: Container, port: str) -> None:
        name = container.name
        ip("netns", "add", name)
        ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", port, "master", self.bridge, "up")
        ip("-n", name, "address", "add", f"{container.address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", f"{self.prefix}1")

    def remove(self) -> None:
        """Remove all containers, the last ones first, and their volumes."""
        for container in reversed(self.containers):
            with suppress(AssertionError):  # it did not start
                self.images.run("rm", "--force", "--time", "0", container.name)
            with suppress(subprocess.CalledProcessError):  # it shared the network of another one
                ip("netns", "delete", container.name)
        self.images.run("volume", "prune", "--force")


@contextmanager
def container_network(images: Images) -> Iterator[ContainerNetwork]:
    """Make an empty network. Its containers are removed at the end of the context."""
    with ExitStack() as stack:
        bridge, prefix = free_network()
        ip("link", "add", bridge, "address", MAC, "type", "bridge")
        stack.callback(ip, "link", "delete", bridge)
        ip("address", "add", f"{prefix}1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        made = ContainerNetwork(images, bridge, prefix)
        stack.callback(made.remove)
        yield made
