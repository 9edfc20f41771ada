"""Hosts for a test, made of Linux namespaces.

Each host has its own address, processes and files. Its sshd accepts the test's key for root.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvroute.local.processes import die_with_parent
from tests.support.untested import MISSING

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
TOOLS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "rsync", "curl", "hostname")
HOME = "/tmp/home"  # root's home folder on every host

# The address of the switch. Without a fixed address, the switch would use the address of one of its
# ports, and all hosts would lose the connection when that port is deleted.
MAC = "02:00:00:00:00:01"

# The init script of a host. Arguments: the folder with the host's files; its name; a folder that
# stays visible although the host has its own /tmp. The script prints "made", waits until the test
# process has set up the network, and prints "up". It runs in bash, which reaps orphaned processes.
# Ray's files are deleted at each boot, as on a machine whose /tmp is in memory.
INIT = """
set -e
files=$1 name=$2 kept=$3
hostname "$name"
ip link set lo up
mkdir -p "$files"/{tmp/home,run/sshd}
rm -rf "$files/tmp/ray"
chmod 1777 "$files/tmp"
touch "$files/$HOME/.bashrc"
sed "s#^\\(root:.*\\):[^:]*:\\([^:]*\\)\\$#\\1:$HOME:\\2#" /etc/passwd >"$files/passwd"
mount --bind "$files/passwd" /etc/passwd
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$name" >"$files/hosts"
mount --bind "$files/hosts" /etc/hosts
mount --bind "$files/run" /run
mount -t tmpfs tmpfs /dev/shm
case $kept in /tmp/*) mkdir -p "$files$kept"; mount --bind "$kept" "$files$kept" ;; esac
cp "$files/sshd_config" "$files/../key" "$files/../key.pub" "$files/run"
mount --rbind "$files/tmp" /tmp
chmod 600 /run/key
echo made
read -r
"$SSHD" -D -e -f /run/sshd_config &
echo up
wait
"""


def why_not() -> str | None:
    """Return why this machine cannot create hosts; None if it can."""
    if os.geteuid() != 0:
        return "only root can make hosts out of namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or SSHD is None:
        return f"{MISSING}{', '.join(missing or ['sshd'])}"
    probe = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--fork", "true"], capture_output=True
    )
    return "this kernel makes no namespaces" if probe.returncode else None


@dataclass
class Host:
    """A running host."""

    name: str
    address: str
    port: str  # name of the switch's port to which the host is connected
    init: subprocess.Popen[str]
    files: Path

    def kill(self) -> None:
        """Kill all processes of the host, and delete its connection."""
        with self.init:  # closes its pipes
            self.init.kill()
        # This command fails if the connection was already deleted.
        subprocess.run(["ip", "link", "delete", self.port], capture_output=True)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the host; none if it was killed."""
        if self.init.returncode is not None:
            return []
        return psutil.Process(self.init.pid).children(recursive=True)


@dataclass
class Network:
    """A switch and the hosts on it. The test process has the first address of the network."""

    folder: Path
    bridge: str
    prefix: str  # common prefix of the addresses, such as "10.77.5."
    environment: Mapping[str, str]  # environment variables of ssh sessions
    hosts: list[Host] = field(default_factory=list)

    @property
    def key(self) -> Path:
        return self.folder / "key"

    def add(self, name: str) -> Host:
        """Add a host to the network; return it when it accepts ssh."""
        number = len(self.hosts) + 2
        address, port = f"{self.prefix}{number}", f"{self.bridge}p{number}"
        files = self.folder / name
        files.mkdir()
        (files / "sshd_config").write_text(_sshd_config(address, self.environment))
        host = Host(name, address, port, _init(files, name), files)
        self.hosts.append(host)
        self._connect(host)
        return host

    def boot(self, host: Host) -> None:
        """Start a host again that was killed. It has the same files."""
        host.init = _init(host.files, host.name)
        self._connect(host)

    def kill(self) -> None:
        """Kill all hosts."""
        for host in self.hosts:
            host.kill()

    def _connect(self, host: Host) -> None:
        _expect(host, "made")
        pid = str(host.init.pid)
        ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        ip("link", "set", host.port, "master", self.bridge, "up")
        inside = ("nsenter", "--net", "--target", pid, "ip")
        _run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "route", "add", "default", "via", f"{self.prefix}1")
        assert host.init.stdin is not None
        host.init.stdin.write("\n")
        host.init.stdin.flush()
        _expect(host, "up")

    def cut(self, host: Host) -> None:
        """Disconnect a host from the switch. Both sides keep running."""
        ip("link", "set", host.port, "nomaster")

    def heal(self, host: Host) -> None:
        ip("link", "set", host.port, "master", self.bridge)


@contextmanager
def network(environment: Mapping[str, str]) -> Iterator[Network]:
    """Create an empty network. All its hosts are killed at the end of the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-hosts-")))
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
        bridge, prefix = free_network()
        ip("link", "add", bridge, "address", MAC, "type", "bridge")
        stack.callback(ip, "link", "delete", bridge)
        ip("address", "add", f"{prefix}1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        made = Network(folder, bridge, prefix, environment)
        stack.callback(made.kill)
        yield made


def free_network() -> tuple[str, str]:
    """Return the name of a bridge that does not exist, and the prefix of its addresses."""
    taken = ip("-o", "link")
    for number in range(1, 255):
        if (bridge := f"kvr{number}") not in taken:
            return bridge, f"10.77.{number}."
    raise RuntimeError("every network from 10.77.1.0 to 10.77.254.0 is taken")


def _init(files: Path, name: str) -> subprocess.Popen[str]:
    namespaces = ("--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc")
    unshare = ("unshare", *namespaces, "--fork", "--kill-child")
    log = (files / "log").open("w")
    with log:
        return subprocess.Popen(
            [*unshare, "bash", "-c", INIT, "init", str(files), name, sys.prefix],
            env={"PATH": os.environ["PATH"], "HOME": HOME, "SSHD": str(SSHD)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _expect(host: Host, word: str) -> None:
    assert host.init.stdout is not None
    line = host.init.stdout.readline().strip()
    assert line == word, f"host {host.name}: {(host.files / 'log').read_text()}"


def _sshd_config(address: str, environment: Mapping[str, str]) -> str:
    return f"""
ListenAddress {address}
HostKey /run/key
AuthorizedKeysFile /run/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv {" ".join(f'"{name}={value}"' for name, value in environment.items())}
"""


def ip(*words: str) -> str:
    """Run `ip`; return its output."""
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
