"""Idle connections end, and never take all connections that HAProxy may hold."""

import resource

import pytest
from ray.serve._private import haproxy_templates

from kvroute.local.haproxy import connections as haproxy_connections
from kvroute.local.haproxy.connections import DEFAULT_IDLE_S, limited, max_connections
from kvroute.settings.serve import ServeSettings

TEMPLATE = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
GB = 10**9


def test_the_limits_are_in_serves_configuration() -> None:
    config = """global
    maxconn 4096
defaults
    timeout client 3600s
    timeout http-keep-alive 86400s
frontend http_frontend
    bind *:8000
"""
    assert (
        limited(config, limit=1000, idle_s=1.5)
        == """global
    maxconn 1000
defaults
    timeout client 90000ms
    timeout http-keep-alive 1500ms
frontend http_frontend
    bind *:8000
    http-after-response set-header connection close if { fe_conn ge 800 }
"""
    )


@pytest.mark.parametrize(
    "line",
    [
        "    maxconn {{ config.maxconn }}\n",
        "%}timeout client {",
        "timeout http-keep-alive ",
        "option splice-",
    ],
)
def test_serves_configuration_still_has_these_lines(line: str) -> None:
    assert line in TEMPLATE


@pytest.mark.parametrize(
    ("files", "memory_gb", "most"),
    [
        (65_536, 64, 32_518),  # limited by file descriptors
        (1_048_576, 64, 125_000),  # limited by memory
        (resource.RLIM_INFINITY, 64, 125_000),
        (256, 64, 64),  # very few file descriptors
    ],
)
def test_the_limit_follows_from_file_descriptors_and_memory(
    monkeypatch: pytest.MonkeyPatch, files: int, memory_gb: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(haproxy_connections, "memory_bytes", lambda: memory_gb * GB)
    assert max_connections() == most


def test_the_default_is_the_setting() -> None:
    assert ServeSettings.model_fields["idle_timeout_s"].default == DEFAULT_IDLE_S
