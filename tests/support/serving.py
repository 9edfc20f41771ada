"""A whole cluster for a test: `kvroute serve` as a user runs it, and nothing left afterwards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import redis

from kvroute.doctor.checks import Check
from kvroute.local.embedded_redis import REDIS_SERVER, SECRET
from kvroute.local.ports import free_port

KVROUTE = (sys.executable, "-c", "from kvroute.cli import main; main()")
COMMAND = (*KVROUTE, "serve")
READY = "kvroute ready at "
MARK = "KVROUTE_TEST_MARK"  # inherited by every process that the command starts
STOP_S = 40.0


@dataclass(frozen=True)
class Cluster:
    """A running `kvroute serve`."""

    url: str
    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def output(self) -> str:
        """All that the command has printed."""
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The command itself and every process below it, reparented ones too."""
        return [each for each in psutil.process_iter() if _mark_of(each) == self.mark]

    def named(self, name: str) -> list[psutil.Process]:
        """The processes of that name below the command, also those that hide their environment."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in started if name_of(each) == name]

    def titled(self, title: str) -> list[psutil.Process]:
        """The processes below the command whose title or name contains this."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in started if title in _title_of(each)]

    def routers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "kvroute:Router" in _title_of(process)]

    def wait_for(self, text: str, *, deadline_s: float) -> None:
        """Fails with all of the output when the text is not printed in time."""
        deadline = time.monotonic() + deadline_s
        while text not in self.output():
            assert self.process.poll() is None, f"the command ended early:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} in time:\n{self.output()}"
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """The exit code. Fails when the command, or a process it started, does not end."""
        self.process.send_signal(number)
        exit_code = self.process.wait(STOP_S)
        assert_gone(self)
        return exit_code


@contextmanager
def start_cluster(
    *args: str,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 200.0,
    command: Sequence[str] = COMMAND,
) -> Iterator[Cluster]:
    """`kvroute serve` with these options on a free port, ready; stopped by a Ctrl-C at the end."""
    with launched(*args, env=env, command=command) as cluster:
        cluster.wait_for(READY, deadline_s=deadline_s)
        yield cluster
        exit_code = cluster.stop()
        assert exit_code == 0, f"exit code {exit_code}:\n{cluster.output()}"


@contextmanager
def launched(
    *args: str, env: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
) -> Iterator[Cluster]:
    """The same, but only begun: the caller says what to wait for and how it ends."""
    port, mark = free_port(), uuid.uuid4().hex
    with TemporaryDirectory() as folder:
        log = Path(folder) / "output.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--port", str(port), *args],
                env={**os.environ, "XDG_STATE_HOME": folder, **(env or {}), MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its signals are not ours
            )
        cluster = Cluster(f"http://127.0.0.1:{port}", process, mark, log)
        try:
            yield cluster
        finally:
            _kill(cluster)


def redis_of(cluster: Cluster) -> "redis.Redis":
    """The Redis that the command has started."""
    (server,) = cluster.named(REDIS_SERVER)
    (port,) = {
        net_connection.laddr.port
        for net_connection in server.net_connections("inet")
        if net_connection.status == "LISTEN"
    }
    _, password, _ = Path(server.cwd(), SECRET).read_text().split('"')
    return redis.Redis(port=port, password=password)


def doctor(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    """`kvroute doctor`, and what it has printed."""
    command = [*KVROUTE, "doctor", *options, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def assert_gone(cluster: Cluster, *, within_s: float = 10.0) -> None:
    """Fails when a process of the cluster still exists after that time."""
    deadline = time.monotonic() + within_s
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still running: {left}\n{cluster.output()}"


def kill_at_once(processes: Iterable[psutil.Process]) -> None:
    """As a node dies: none of them sees another one end, and starts a third."""
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)


def _kill(cluster: Cluster) -> None:
    """Whatever a failed test has left."""
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.process.wait()


def _title_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.name()} {' '.join(process.cmdline()[:1])}"
    return ""


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""  # ended meanwhile


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None  # ended meanwhile, or somebody else's


def findings(examined: subprocess.CompletedProcess[str]) -> list[Check]:
    """What `doctor` with --json said."""
    return [Check(**check) for check in json.loads(examined.stdout)]
