"""A plugin of pytest for vLLM's own tests: they use a server that runs already.

It is loaded with `-p running_server` in a process whose `tests` folder is vLLM's, not ours.
"""

import importlib
import os
from typing import Any

import pytest

URL = "KVROUTE_SUITE_URL"  # the environment variable with the server's address
SERVER = "RemoteOpenAIServer"  # the class of vLLM's tests that starts a server


def pytest_configure() -> None:
    """Make vLLM's class use the running server, and download nothing; a hook of pytest."""
    server = getattr(importlib.import_module("tests.utils"), SERVER)
    server.uds = None
    server.__init__ = _use_running_server
    server.__exit__ = lambda *_: None
    hub: Any = importlib.import_module("huggingface_hub")
    hub.HfApi.snapshot_download = lambda *_, **__: ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that ask no server: they say nothing about it; a hook of pytest."""
    left_out = [item for item in items if not _asks_server(item)]
    items[:] = [item for item in items if _asks_server(item)]
    config.hook.pytest_deselected(items=left_out)


def _asks_server(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    by_fixture = any("server" in name for name in item.fixturenames)
    return by_fixture or SERVER in item.function.__code__.co_names


def _use_running_server(server: Any, *_: Any, **__: Any) -> None:
    """Take the running server's address, whatever model and options the test asks for."""
    address = os.environ[URL].removeprefix("http://")
    host, port = address.split(":")
    server.host, server.port = host, int(port)
