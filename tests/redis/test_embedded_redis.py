"""Our own Redis is a real one, and never outlives us."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from kvroute.local.embedded_redis import (
    RedisAwayError,
    _executable,
    check_redis,
    embedded_redis,
    redis_warnings,
    without_password,
)
from kvroute.local.ports import free_port
from kvroute.machine.problem import StartError
from kvroute.store.connection import refusal
from tests.support.waiting import wait_until

EPHEMERAL = 32_768  # the first port that Linux gives to outgoing connections
PARENT = """
import time
from kvroute.local.embedded_redis import embedded_redis
with embedded_redis() as url:
    print(url, flush=True)
    time.sleep(60)
"""


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            client.ping()
        except redis.ConnectionError:
            return False
        return True


def test_it_answers_and_ends_with_the_block() -> None:
    with embedded_redis() as url:
        assert answers(url)
        assert check_redis(url) >= "6.2"
    assert not answers(url)


def test_it_starts_empty_and_two_are_apart() -> None:
    with embedded_redis() as one, embedded_redis() as other:
        with redis.Redis.from_url(one) as client:
            client.set("key", "value")
        with redis.Redis.from_url(other) as client:
            assert client.dbsize() == 0


def test_it_leaves_no_process_after_an_error() -> None:
    before = psutil.Process().children()
    with contextlib.suppress(ZeroDivisionError), embedded_redis():
        (server,) = set(psutil.Process().children()) - set(before)
        raise ZeroDivisionError
    assert not server.is_running()


def server_of(before: Iterable[psutil.Process]) -> psutil.Process:
    """Return the Redis that this process runs, and did not run before."""
    (server,) = {*psutil.Process().children()} - {*before}
    return server


def test_a_killed_one_is_started_again_with_the_same_url_and_this_is_said() -> None:
    before, lines = psutil.Process().children(), list[str]()
    with embedded_redis(lines.append) as url, redis.Redis.from_url(url) as client:
        client.set("key", "value")
        server_of(before).kill()
        wait_until(lambda: len(lines) == 2)
        assert client.dbsize() == 0
    ended, back = lines
    assert ended.startswith("Redis has ended (Killed); kvroute starts it again")
    assert back.startswith("Redis is back after")


def test_what_is_stored_in_a_folder_is_there_after_a_kill_and_after_a_restart(
    tmp_path: Path,
) -> None:
    before, lines = psutil.Process().children(), list[str]()
    with embedded_redis(lines.append, state=tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("first", "value")
        server_of(before).kill()
        wait_until(lambda: len(lines) == 2)
        assert client.get("first") == b"value"
        client.set("second", "value")
        with (
            pytest.raises(StartError, match="which another kvroute uses; stop that one"),
            embedded_redis(state=tmp_path),
        ):
            pass
    assert lines[-1].endswith("nothing is lost")
    with embedded_redis(state=tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.mget("first", "second") == [b"value"] * 2
    assert (tmp_path / "redis").stat().st_mode & 0o077 == 0, "only its user can read it"


def test_one_that_ends_again_and_again_is_given_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, lines = psutil.Process().children(), list[str]()
    monkeypatch.setattr("kvroute.local.embedded_redis.PAUSES_S", (0.0, 0.2))
    with embedded_redis(lines.append) as url:
        monkeypatch.setattr("kvroute.local.embedded_redis._executable", lambda: "/bin/false")
        server_of(before).kill()
        wait_until(lambda: lines and "is not started again" in lines[-1])
        assert not answers(url)
    assert "(exit code 1) 3 times in a row" in lines[-1]
    assert "--redis-url" in lines[-1]


def test_it_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        url = parent.stdout.readline().decode().strip()
        assert answers(url)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while answers(url) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not answers(url)


@pytest.mark.parametrize("rights", ["~* +@all -@write", "resetkeys ~other:* +@all"])
def test_a_redis_that_refuses_writes_of_its_user_is_refused(rights: str) -> None:
    with embedded_redis() as url, redis.Redis.from_url(url) as client:
        client.execute_command(*f"ACL SETUSER default on nopass {rights}".split())
        with pytest.raises(StartError, match=r"refuses a write .* user who may write") as failed:
            check_redis(url)
        assert not isinstance(failed.value, RedisAwayError)


@pytest.mark.parametrize(
    ("refusing", "said"),
    [
        ("REPLICAOF 127.0.0.1 1", "is a replica .*; set --redis-url to its primary"),
        ("CONFIG SET maxmemory 1", "is full .*; raise the maxmemory"),
        ("CONFIG SET min-replicas-to-write 1", "has too few replicas .*; start the replicas"),
    ],
)
def test_a_cluster_can_start_while_its_redis_refuses_writes_for_now(
    refusing: str, said: str
) -> None:
    with embedded_redis() as url, redis.Redis.from_url(url) as client:
        client.execute_command(*refusing.split())
        with pytest.raises(RedisAwayError, match=said):
            check_redis(url)
        with pytest.raises(redis.ResponseError) as refused:
            client.set("kvroute:key", 1)
        assert refusal(refused.value)


@pytest.mark.parametrize("mode", ["sentinel", "cluster"])
def test_a_server_of_another_mode_is_refused(tmp_path: Path, mode: str) -> None:
    # A cluster's server listens also 10,000 ports higher, where no connection may have the port.
    port = next(port for port in iter(free_port, None) if port + 10_000 < EPHEMERAL)
    (tmp_path / "server.conf").write_text(f"port {port}\ndir {tmp_path}\nbind 127.0.0.1\n")
    options = ["--sentinel"] if mode == "sentinel" else ["--cluster-enabled", "yes"]
    command = [str(_executable()), str(tmp_path / "server.conf"), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(f"redis://127.0.0.1:{port}"))
            with pytest.raises(StartError, match=f"in {mode} mode"):
                check_redis(f"redis://127.0.0.1:{port}")
        finally:
            server.kill()


def test_a_redis_that_does_not_answer_is_named_with_the_remedy() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(StartError, match=rf"--redis-url is '{url}'.*kvroute starts one"):
        check_redis(url)


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(StartError, match=r"--redis-url is 'localhost'"):
        check_redis("localhost")


def test_its_password_is_on_no_command_line() -> None:
    before = psutil.Process().children()
    with embedded_redis() as url:
        (server,) = set(psutil.Process().children()) - set(before)
        password = urlsplit(url).password
        assert password is not None
        assert not any(password in word for word in server.cmdline())


def test_a_wrong_password_is_said_with_the_remedy_and_without_the_password() -> None:
    with embedded_redis() as url:
        wrong = url.replace("redis://:", "redis://:not")
        with pytest.raises(StartError, match=r"refuses the password.*correct it") as failed:
            check_redis(wrong)
    assert str(urlsplit(wrong).password) not in str(failed.value)


SHOWN = [
    ("redis://h:1", "redis://h:1"),
    ("redis://:se-cret@h:1/2", "redis://h:1/2"),
    ("redis://user:se-cret@h:1", "redis://h:1"),
    ("redis://:se-cret/of@two@h:1", "redis://h:1"),
    ("rediss://h:1?password=se-cret&ssl_ca_certs=/ca.pem", "rediss://h:1?ssl_ca_certs=/ca.pem"),
    ("redis://h:1?username=me&password=se-cret", "redis://h:1"),
]


@pytest.mark.parametrize(("url", "shown"), SHOWN)
def test_a_password_is_shown_to_nobody(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("url", ["redis://:se-cret/of@127.0.0.1:1", "redis://:se-cret:x@h:port"])
def test_a_password_that_is_not_quoted_is_not_shown_either(url: str) -> None:
    with pytest.raises(StartError, match="in URL quoting") as failed:
        check_redis(url)
    assert "se-cret" not in str(failed.value)


def test_a_redis_that_deletes_keys_or_has_another_time_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with embedded_redis() as url:
        assert list(redis_warnings(url)) == []
        with redis.Redis.from_url(url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        (policy,) = redis_warnings(url)
        assert "allkeys-lru" in policy
        assert "set maxmemory-policy to noeviction" in policy
        now = time.time
        monkeypatch.setattr("kvroute.local.embedded_redis.time.time", lambda: now() - 700)
        _, clock = redis_warnings(url)
        assert re.search(r"differs by (6\d\d\.\d|700\.0) s", clock)


def test_a_redis_that_does_not_tell_its_policy_gets_no_warning() -> None:
    with embedded_redis() as url, redis.Redis.from_url(url) as client:
        client.acl_setuser("low", enabled=True, passwords=["+low"], commands=["+get"], keys=["*"])
        address = urlsplit(url)
        low = f"redis://low:low@{address.hostname}:{address.port}"
        assert list(redis_warnings(low)) == []
