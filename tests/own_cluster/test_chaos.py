"""Some of what `make chaos` does to a cluster, and no answer is lost."""

import pytest

from tests.chaos.__main__ import torment

pytestmark = pytest.mark.timeout(300)

FAULTS = ("Redis holds rubbish", "clients leave amid their bodies", "idle connections")


def test_streams_go_on_while_others_misbehave() -> None:
    for row in torment(1, [(fault,) for fault in FAULTS]):
        assert row.is_lossless, row
        assert row.whole_s is not None, row
