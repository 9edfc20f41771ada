"""A fixture for tests that look at single outputs of a vLLM engine."""

import pytest


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk of every output of the engine, however slowly they are read."""
    from kvroute.replica.vllm_engine import http_run
    from tests.support.stock import COLLECTORS, Unmerged

    for module in COLLECTORS:
        monkeypatch.setattr(module, "RequestOutputCollector", Unmerged)
    monkeypatch.setattr(http_run, "WHOLE_TOKENS", 1)
