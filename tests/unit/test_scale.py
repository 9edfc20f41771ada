"""`kvroute scale` refuses impossible numbers, and prints the replicas that it waits for."""

import asyncio
import subprocess

import pytest

from kvroute.command.scale_command import has_servers
from kvroute.controller.replica_count import ReplicaCounts, ScaleError, check_resources, describe
from tests.support.serving import KVROUTE, Cluster


async def scale(cluster: Cluster, replicas: int) -> None:
    """Run the command, and fail with its output if it fails."""
    command = [*KVROUTE, "scale", str(replicas), "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def test_more_replicas_than_the_resources_allow_are_refused_with_the_largest_number() -> None:
    deployed = ReplicaCounts(2, {"RUNNING": 2, "STOPPING": 1}, "", {"CPU": 1, "GPU": 2})
    free = {"CPU": 90.0, "GPU": 3.0}
    check_resources(4, deployed, free)
    with pytest.raises(ScaleError, match=r"5 replicas need 2 GPU each: 3 run .* 4 fit"):
        check_resources(5, deployed, free)


def test_draining_replicas_are_shown() -> None:
    deployed = ReplicaCounts(1, {"RUNNING": 1, "STOPPING": 2}, "", {})
    assert "1 of 1 replicas ready, 2 draining" in describe(deployed)
    assert (
        describe(ReplicaCounts(2, {"RUNNING": 3}, "", {}))
        == "2 of 2 replicas ready, 1 to be removed"
    )


def test_a_reason_is_shown_in_our_words_and_only_while_replicas_are_missing() -> None:
    slow = (
        "2 replicas have taken more than 30s to initialize.\nThis may be caused by a slow __init__."
    )
    for message, ready, reason in (
        ("Traceback\nValueError: no GPU", 1, "; ValueError: no GPU"),
        ("Traceback\nValueError: no GPU", 2, ""),
        (slow, 1, "; some take long to start"),
        ("This deployment will be UNHEALTHY until the replica recovers.", 1, ""),
    ):
        deployed = ReplicaCounts(2, {"RUNNING": ready}, message, {})
        assert describe(deployed) == f"{ready} of 2 replicas ready{reason}"


@pytest.mark.parametrize(
    ("replicas", "lost", "expected"),
    [
        ([{"id": "a"}], [], False),
        ([{"id": "a", "server": None}], [], False),
        ([{"id": "a"}, {"id": "b", "server": "http://10.0.0.5:8001"}], [], True),
        ([{"id": "a"}], [{"server": "http://10.0.0.5:8001", "problem": "start it"}], True),
    ],
)
def test_a_cluster_with_attached_servers_is_known_even_if_none_answers(
    replicas: list[dict[str, str]], lost: list[dict[str, str]], expected: bool
) -> None:
    assert has_servers({"replicas": replicas, "servers": lost}) is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0",), "REPLICAS is 0"),
        (("2", "--url", "http://127.0.0.1:1"), "no kvroute answers at http://127.0.0.1:1 "),
    ],
)
def test_an_impossible_request_is_an_error(arguments: tuple[str, ...], message: str) -> None:
    command = [*KVROUTE, "scale", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (refused.returncode, message in refused.stderr) == (1, True)
