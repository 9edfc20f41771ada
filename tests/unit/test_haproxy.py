"""kvroute-haproxy corrects what Serve's configuration of HAProxy leaves open."""

import json
import re

import pytest
from ray.serve._private import haproxy_templates

from kvroute.local.haproxy.error_replies import (
    MESSAGES,
    checks,
    replies,
    unreachable_page,
)
from kvroute.local.haproxy.wrapper import (
    DEFAULT_MAX_REQUESTS,
    TLS,
    hardened,
    knows_routers,
    refusing,
    without_listeners,
)
from kvroute.settings.serve import ServeSettings

TEMPLATE = haproxy_templates.HAPROXY_CONFIG_TEMPLATE


@pytest.fixture
def config() -> str:
    return hardened(TEMPLATE, metrics_host="127.0.0.1", error_page="/folder/page")


@pytest.mark.parametrize(
    ("open_line", "closed_line"),
    [
        (" mode 666 level admin", " mode 600 level admin"),
        ("bind :{{ config.metrics_port }}", "bind 127.0.0.1:{{ config.metrics_port }}"),
        ("bind *:{{ config.stats_port }}", "bind 127.0.0.1:{{ config.stats_port }}"),
        ("http-request return status 404", "http-request deny deny_status 503"),
        ("errorfile 502 {{ config.error_file_path }}", "errorfile 502 /folder/page"),
        ("errorfile 503 {{ config.error_file_path }}", "http-error status 503 "),
        ("tune.bufsize {{ config.bufsize }}", "tune.bufsize 131072\n    tune.http.maxhdr 1000\n"),
    ],
)
def test_lines_that_serve_leaves_open_are_restricted(
    config: str, open_line: str, closed_line: str
) -> None:
    assert open_line in TEMPLATE, "Serve has another configuration now"
    assert open_line not in config
    assert closed_line in config


def test_a_head_must_arrive_in_time_and_other_lines_stay(config: str) -> None:
    assert "defaults\n    timeout http-request 10s\n    mode http" in config
    added = len(checks().splitlines()) + len(replies().splitlines())
    assert "tune.http.maxhdr" not in TEMPLATE
    added += config.count("tune.http.maxhdr") - TEMPLATE.count("    option splice-")
    assert len(config.splitlines()) == len(TEMPLATE.splitlines()) + added


def test_only_the_endpoint_has_tls() -> None:
    config = hardened(TEMPLATE, metrics_host="", error_page="/page", tls_pem="/folder/tls.pem")
    (line,) = (line for line in config.splitlines() if " ssl " in line)
    endpoint = "bind {{ config.frontend_host }}:{{ config.frontend_port }}"
    assert line.strip() == f"{endpoint} {TLS.format('/folder/tls.pem')}"


def test_without_routers_haproxy_does_not_listen_while_a_stand_in_runs(config: str) -> None:
    assert re.search(r"\n +bind ", config)
    assert not re.search(r"\n +bind ", without_listeners(config))
    assert "stats socket" in without_listeners(config)
    assert not knows_routers("backend a\n    option x\n")
    assert knows_routers("backend a\n    server b 127.0.0.1:1 check\n")


def test_requests_over_the_limit_of_all_routers_are_refused() -> None:
    config = """
    use_backend http-a if is_http-a
backend http-a
    server one 127.0.0.1:1 check observe layer4
    server two 127.0.0.1:2 check observe layer4
    server last 127.0.0.1:3 check backup
"""
    rules = set(refusing(config, max_requests=7).splitlines()) - {*config.splitlines()}
    when = "if METH_POST { be_conn(http-a) ge 14 }"
    (openais,) = (rule for rule in rules if rule.endswith(when))
    (anthropics,) = (rule for rule in rules if rule.endswith(f"{when} {MESSAGES}"))
    of_none = config.replace("check observe layer4", "check backup")
    assert "be_conn(http-a) ge 7 }" in refusing(of_none, max_requests=7)
    error = json.loads(openais.split("'")[1])["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    error = json.loads(anthropics.split("'")[1])
    assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
    assert ServeSettings.model_fields["max_requests"].default == DEFAULT_MAX_REQUESTS


def test_clients_can_parse_the_error_page() -> None:
    head, _, body = unreachable_page().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert f"content-length: {len(body)}" in head
    assert json.loads(body)["error"]["type"] == "server_error"
