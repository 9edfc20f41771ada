"""A replica that read another chat template is degraded until it is restarted."""

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.support.clients import async_openai_client
from tests.support.model_files import change_template
from tests.support.serving import KVROUTE, Cluster, doctor
from tests.support.waiting import until


async def test_a_replica_that_read_another_template_is_degraded_until_it_is_restarted(
    slow: Cluster, slow_model: Path
) -> None:
    """It starts after the files were changed, as on a node that has others than the rest."""
    cluster, model = slow, slow_model
    original = (model / "chat_template.jinja").read_text()

    def degraded() -> dict[str, str]:
        health: dict[str, Any] = httpx.get(f"{cluster.url}/health", timeout=10).json()
        return dict(health["degraded"])

    assert degraded() == {}
    change_template(model)
    kvroute("scale", "2", "--url", cluster.url)
    await until(degraded)
    [(stranger, reason)] = degraded().items()
    assert reason.startswith("its template digest is ")
    shown = " ".join(kvroute("status", "--url", cluster.url).split())
    assert f"DEGRADED the cache of {stranger} is ignored" in shown

    (check,) = (each for each in examined(cluster) if each["name"] == "handshake")
    assert (check["grade"], stranger in check["finding"]) == ("wrong", True)
    assert "template digest" in check["finding"]

    answers = [await answered(cluster.url) for _ in range(2)]
    served = Counter(replica for replica, _ in answers[0] + answers[1])
    assert served[stranger] > 0, "it gets its share of the work"
    assert all(tokens == 0 for replica, tokens in answers[1] if replica == stranger)
    assert any(tokens > 0 for replica, tokens in answers[1] if replica != stranger)

    (model / "chat_template.jinja").write_text(original)
    (pid,) = (replica["pid"] for replica in replicas(cluster.url) if replica["id"] == stranger)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: len(replicas(cluster.url)) == 2 and not degraded())


def examined(cluster: Cluster) -> list[dict[str, Any]]:
    """What the doctor finds; something is wrong."""
    found = doctor(cluster, "--json")
    assert found.returncode == 1
    return list(json.loads(found.stdout))


def replicas(url: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{url}/v1/cluster", timeout=10).json()["replicas"]
    return listed


async def answered(url: str) -> list[tuple[str, int]]:
    """Who answered each of forty prompts, and how many tokens were expected to be cached there."""
    async with async_openai_client(url) as client:

        async def ask(number: int) -> tuple[str, int]:
            answer = await client.completions.with_raw_response.create(
                model="m", prompt=f"{number} and so on. " * 40, max_tokens=20
            )
            headers = answer.headers
            return headers["x-kvroute-replica"], int(headers["x-kvroute-expected-tokens"])

        return await asyncio.gather(*map(ask, range(40)))


def kvroute(*args: str) -> str:
    """What the command prints, without its line breaks."""
    done = subprocess.run([*KVROUTE, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())
