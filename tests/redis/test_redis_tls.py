"""A Redis with TLS is reached by those who trust its authority, and nobody else is believed."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.exceptions import RedisError

from kvroute.local.embedded_redis import check_redis
from kvroute.machine.problem import StartError
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.certificates import certificate
from tests.support.redis_server import redis_with_tls

Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Of another authority."""
    return certificate(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def url(certified: Pair) -> Iterator[str]:
    with redis_with_tls(certified) as url:
        yield url


def trusting(url: str, pair: Pair) -> str:
    return f"{url}?ssl_ca_certs={pair[0]}"


def test_it_is_checked_before_the_start(url: str, certified: Pair) -> None:
    assert check_redis(trusting(url, certified)) >= "6.2"


async def test_the_index_is_read_through_it(url: str, certified: Pair) -> None:
    async with connect(trusting(url, certified)) as redis:
        assert await Index(redis, "m").records() == []
        assert await redis.ping()


@pytest.mark.parametrize("trusted", ["other", "nobody in particular"])
def test_another_authority_is_an_error_with_the_remedy(url: str, other: Pair, trusted: str) -> None:
    asked = trusting(url, other) if trusted == "other" else url
    with pytest.raises(StartError, match=r"ssl_ca_certs=/path/ca\.pem") as failed:
        check_redis(asked)
    assert str(urlsplit(url).password) not in str(failed.value)


def test_an_authority_without_a_file_is_an_error_with_the_remedy(url: str) -> None:
    with pytest.raises(StartError, match=r"ssl_ca_certs=/path/ca\.pem"):
        check_redis(f"{url}?ssl_ca_certs=/nowhere/ca.pem")


@pytest.mark.parametrize("file", ["other", "/nowhere/ca.pem"])
async def test_to_a_process_that_runs_it_is_as_if_redis_were_away(
    url: str, other: Pair, file: str
) -> None:
    """Which costs speed, and no request."""
    trusted = other[0] if file == "other" else file
    async with connect(f"{url}?ssl_ca_certs={trusted}") as redis:
        with pytest.raises((RedisError, OSError)):
            await Index(redis, "m").records()


def test_without_tls_it_says_nothing(url: str) -> None:
    with pytest.raises(StartError, match="does not answer"):
        check_redis(url.replace("rediss", "redis"))
