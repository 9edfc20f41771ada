"""The configurations of load balancers that we ship agree with the routers."""

import re

import openai
import pytest

from kvroute.settings.router import RouterSettings
from tests.support.load_balancers import shipped


@pytest.mark.parametrize(
    ("name", "silence"),
    [("haproxy.cfg", r"timeout server (\d+)h"), ("nginx.conf", r"proxy_read_timeout (\d+)h;")],
)
def test_an_answer_may_take_longer_than_a_client_waits(name: str, silence: str) -> None:
    (hours,) = re.findall(silence, shipped(name))
    read_s = openai.DEFAULT_TIMEOUT.read
    assert read_s is not None
    assert int(hours) * 3600 > read_s


def test_nginx_takes_the_largest_body_that_a_router_takes() -> None:
    limit_mb = RouterSettings.model_fields["max_body_mb"].default
    assert f"client_max_body_size {limit_mb}m" in shipped("nginx.conf")
