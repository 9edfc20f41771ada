"""A replica that differs from the routers is seen; it works, and its cache counts for nothing."""

import asyncio
import dataclasses
import json
import logging
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from replica.identity import Identity, identify
from replica.kvindex.index import ReplicaRecord
from replica.model import BUILTIN_MODEL, resolve
from router.routing.fleet import Fleet
from router.routing.handshake import WORDS, Handshake, differences
from tests.conftest import async_openai_client
from tests.serving import KVROUTE, Cluster, doctor, start_cluster
from tests.waiting import until

BLOCK = 4
OURS = Identity("kvroute/1", "", BLOCK, "aaaa", "bbbb")
ENGINE = {
    "capacity_blocks": 100,
    "max_model_len": 4096,
    "prefill_tokens_per_s": 1000.0,
    "attention_tokens": 32_768.0,
    "prefix_caching": True,
}
LOAD = {"running": 0, "waiting": 0, "used_blocks": 0}
PROMPT = np.arange(41, dtype=np.uint32)


def record(replica_id: str, **differs: Any) -> ReplicaRecord:
    facts = ENGINE | dataclasses.asdict(OURS) | differs
    return ReplicaRecord(replica_id, "1", 0, facts, LOAD)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """All of the built-in model but its weights, to be changed."""
    source = Path(resolve(BUILTIN_MODEL))
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    return tmp_path


def change_template(model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another version #}")


def test_a_replica_that_is_like_the_router_differs_in_nothing() -> None:
    assert differences(OURS, record("a").facts) == ""


@pytest.mark.parametrize("fact", WORDS)
def test_a_difference_is_named_with_both_values(fact: str) -> None:
    reason = differences(OURS, record("a", **{fact: "other"}).facts)
    mine = getattr(OURS, fact) or "empty"
    assert reason == f"its {fact.replace('_', ' ')} is other, the router's {mine}"


def test_another_adapter_under_one_name_is_a_difference_and_one_adapter_more_is_none() -> None:
    ours = dataclasses.replace(OURS, adapters={"sql": "1111", "law": "2222"})
    assert differences(ours, record("a", adapters={"sql": "1111", "poems": "3333"}).facts) == ""
    reason = differences(ours, record("a", adapters={"sql": "4444"}).facts)
    assert reason == "its LoRA adapter sql is 4444, the router's 1111"


def test_what_an_older_replica_does_not_say_counts_as_equal() -> None:
    facts = {k: v for k, v in record("a").facts.items() if k != "template_digest"}
    assert differences(OURS, facts) == ""


def test_a_degraded_replica_is_logged_once_and_again_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handshake, other = Handshake(OURS), record("b", block_size=16)
    with caplog.at_level(logging.WARNING, "kvroute.handshake"):
        for records in ([record("a"), other], [other], [record("b")], [other]):
            handshake.look(records)
    assert [each.getMessage().split()[1] for each in caplog.records] == ["b", "b"]
    assert "its block size is 16, the router's 4" in caplog.text


def test_what_a_degraded_replica_holds_counts_for_nothing() -> None:
    fleet = Fleet(
        model="m", revision="", block_size=BLOCK, rng=random.Random(0), handshake=Handshake(OURS)
    )
    fleet.mirror.join("a")
    fleet.mirror.add("a", fleet.chain(PROMPT, ""))
    fleet.update([record("a"), record("b")])
    assert fleet.place(PROMPT, "", ["a", "b"], 0.0).at("a").hit_blocks == 10
    fleet.update([record("a", template_digest="cccc"), record("b")])
    placement = fleet.place(PROMPT, "", ["a", "b"], 0.0)
    assert placement.best_hit_blocks == placement.at("a").hit_blocks == 0
    assert {each.replica_id for each in placement.ranking} == {"a", "b"}
    assert fleet.sent(placement, "a", "r", 0.0).dispatch.expected == ()


def test_the_identity_of_a_folder_is_what_its_files_say(model: Path) -> None:
    first = identify(str(model), revision="r1", block_size=32)
    assert first == identify(str(model), revision="r1", block_size=32)
    assert len(first.tokenizer_digest) == len(first.template_digest) == 16
    change_template(model)
    second = identify(str(model), revision="r1", block_size=32)
    assert second.template_digest != first.template_digest
    assert second.tokenizer_digest == first.tokenizer_digest


def test_a_template_may_stand_in_the_tokenizers_configuration(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert identify(str(model), revision="", block_size=32).template_digest == ""
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ hi }}"}))
    assert identify(str(model), revision="", block_size=32).template_digest != ""


def test_a_model_without_files_at_hand_has_empty_digests(tmp_path: Path) -> None:
    found = identify(str(tmp_path), revision="", block_size=32)
    assert (found.tokenizer_digest, found.template_digest) == ("", "")


@pytest.mark.timeout(180)
async def test_a_replica_that_read_another_template_is_degraded_until_it_is_restarted(
    model: Path,
) -> None:
    """It starts after the files were changed, as on a node that has others than the rest."""
    args = ("--engine", "simulated", "--replicas", "1", "--simulated-decode-ms", "2")
    original = (model / "chat_template.jinja").read_text()
    with start_cluster("--model", str(model), "--served-model-name", "m", *args) as cluster:

        def degraded() -> dict[str, str]:
            health: dict[str, Any] = httpx.get(f"{cluster.url}/health", timeout=10).json()
            return dict(health["degraded"])

        assert degraded() == {}
        change_template(model)
        kvroute("scale", "2", "--url", cluster.url)
        await until(degraded)
        [(stranger, reason)] = degraded().items()
        assert reason.startswith("its template digest is ")
        assert f"{stranger} is DEGRADED" in kvroute("status", "--url", cluster.url)

        (check,) = (each for each in examined(cluster) if each["name"] == "handshake")
        assert (check["grade"], stranger in check["finding"]) == ("wrong", True)
        assert "template digest" in check["finding"]

        answers = [await answered(cluster.url) for _ in range(2)]
        served = Counter(replica for replica, _ in answers[0] + answers[1])
        assert served[stranger] > 0, "it gets its share of the work"
        assert all(tokens == 0 for replica, tokens in answers[1] if replica == stranger)
        assert any(tokens > 0 for replica, tokens in answers[1] if replica != stranger)

        (model / "chat_template.jinja").write_text(original)
        (pid,) = (each["pid"] for each in replicas(cluster.url) if each["id"] == stranger)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(replicas(cluster.url)) == 2 and not degraded(), within_s=60)


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
