"""Some of what `make chaos` does to a cluster, and no answer is lost."""

from tests.chaos.__main__ import STOPPED, torment

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
