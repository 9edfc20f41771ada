"""The doctor's checks of batches and their files."""

from typing import Any

import pytest

from kvroute.features.batches.batch_checks import batches

GOOD = {"problem": "", "used_bytes": 10, "quota_bytes": 1000, "free_bytes": 1000, "running": []}


def running(id_: str, *, still_s: float = 0.0, pause: str = "") -> dict[str, Any]:
    return {"id": id_, "status": "in_progress", "still_s": still_s, "left_s": 9.0, "pause": pause}


@pytest.mark.parametrize(
    ("facts", "grades", "finding"),
    [
        (None, [], ""),
        (GOOD, ["ok", "ok"], "0 running"),
        (GOOD | {"running": [running("b1")]}, ["ok", "ok"], "1 running"),
        (GOOD | {"running": [running("b1", still_s=900)]}, ["warning", "ok"], "b1 without"),
        (GOOD | {"running": [running("b1", pause="full")]}, ["wrong", "ok"], "b1 paused: full"),
        (GOOD | {"used_bytes": 950}, ["ok", "warning"], "0 running"),
        (GOOD | {"used_bytes": 500, "free_bytes": 10}, ["ok", "warning"], "0 running"),
        ({"problem": "2 folders", "is_default": False}, ["wrong"], "2 folders"),
        ({"problem": "2 folders", "is_default": True}, ["ok"], "no batches: 2 folders"),
    ],
)
def test_batches_are_judged(facts: dict[str, Any] | None, grades: list[str], finding: str) -> None:
    found = [*batches(facts)]
    assert [check.grade for check in found] == grades
    assert all(bool(check.remedy) == (check.grade != "ok") for check in found)
    if found:
        assert finding in found[0].finding
