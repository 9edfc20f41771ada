"""What the doctor says about the links between replicas."""

import pytest

from kvroute.features.pulls import Pulling
from kvroute.features.pulls.pull_checks import pulls
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load


def link(**differs: float) -> dict[str, float]:
    return {"bytes_per_s": 1e9, "tokens": 8192, "pull_s": 0.5, "computing_s": 2.0} | differs


def test_a_link_that_is_slower_than_computing_is_a_warning() -> None:
    (check,) = pulls({"a": link(), "b": link(bytes_per_s=1e8, pull_s=5.0)})
    assert (check.name, check.grade) == ("pulls", "warning")
    assert check.finding == (
        "replica b pulls blocks at 0.1 GB/s: 8,192 tokens take 5 s, and computing them 2 s"
    )


def test_links_that_are_faster_than_computing_are_ok() -> None:
    (check,) = pulls({"a": link(), "b": link(bytes_per_s=2e9)})
    assert (check.grade, check.finding) == ("ok", "2 replicas can pull blocks, at 1 GB/s or more")
    assert not [*pulls({})]
    assert not [*Pulling().checks([])]


def test_pulls_need_host_memory() -> None:
    with pytest.raises(SettingsError, match=r"--pull is 'on', which needs .* --host-cache-gb"):
        load({"pull": "on"})
    load({"pull": "on", "host_cache_gb": 4})
