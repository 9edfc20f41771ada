"""Some of what `make chaos` does to a cluster, and no answer is lost."""

from tests.chaos.__main__ import PULLING, STOPPED, torment
from tests.chaos.pull_faults import PULL_FAULTS

SCHEDULE = (
    ("Redis holds rubbish",),
    ("clients leave amid their bodies", "7,000 idle connections"),
    ("Redis is a replica for some time", "bursts of tiny requests, and a long one"),
    (STOPPED,),
)
HELD_S = 3.0


def test_streams_go_on_while_others_misbehave() -> None:
    for row in torment(1, SCHEDULE, held_s=HELD_S):
        assert row.is_lossless, row
        assert row.whole_s is not None, row


def test_answers_are_the_same_when_a_replica_fails_during_pulls() -> None:
    for row in torment(1, [(name,) for name in PULL_FAULTS], PULLING, held_s=HELD_S):
        assert row.is_lossless, row
        assert row.whole_s is not None, row
