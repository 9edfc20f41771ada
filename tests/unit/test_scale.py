"""`kvroute scale` refuses what cannot be had, and says what it waits for."""

import asyncio
import subprocess

import pytest

from kvroute.command.scale import Deployed, ScaleError, describe, refuse_no_room
from tests.support.serving import KVROUTE, Cluster


async def scale(cluster: Cluster, replicas: int) -> None:
    """Fails with what the command printed when it fails."""
    command = [*KVROUTE, "scale", str(replicas), "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def test_more_replicas_than_there_is_room_for_are_refused_with_what_can_be_had() -> None:
    deployed = Deployed(2, {"RUNNING": 2, "STOPPING": 1}, "", {"CPU": 1, "GPU": 2})
    free = {"CPU": 90.0, "GPU": 3.0}
    refuse_no_room(4, deployed, free)
    with pytest.raises(ScaleError, match=r"5 replicas of 2 GPU .* 3 are there, .* 4 is the most"):
        refuse_no_room(5, deployed, free)


def test_it_says_what_it_waits_for() -> None:
    deployed = Deployed(1, {"RUNNING": 1, "STOPPING": 2}, "", {})
    assert "1 of 1 replicas ready, 2 taken away: finishing what they run" in describe(deployed)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("0",), "REPLICAS is 0"), (("2", "--url", "http://127.0.0.1:1"), "where no kvroute answers")],
)
def test_what_cannot_be_scaled_is_said(arguments: tuple[str, ...], complaint: str) -> None:
    command = [*KVROUTE, "scale", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, complaint in refused.stderr) == (1, True)
