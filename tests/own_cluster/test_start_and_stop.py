"""A start that cannot succeed says why, and a stop leaves no process, whenever it comes."""

import signal

import pytest

from tests.support.serving import assert_gone, launched


def test_a_start_that_fails_says_why_and_leaves_no_process() -> None:
    with launched("--model", "/nowhere") as cluster:
        assert cluster.process.wait(60) == 1
        assert "model is '/nowhere', where there is no config.json" in cluster.output()
        assert_gone(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_leaves_no_process(number: signal.Signals) -> None:
    with launched("--engine", "simulated") as cluster:
        cluster.wait_for("starting Ray", deadline_s=60)
        assert cluster.stop(number) == 0
