"""A fleet is upgraded and rolled back under load, with the steps of docs/operations/upgrades.md.

The old version is an earlier commit. Both versions use the packages of this environment.
"""

import json
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from redis import Redis

from kvroute.doctor.checks import Check
from kvroute.local.running import KEY
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.engines import terse_model
from tests.support.serving import START_S, Cluster
from tests.support.upgraded_fleet import (
    PREFIX,
    BegunBatch,
    Fleet,
    Work,
    begin,
    cold,
    declare,
    fleet,
    load,
)
from tests.support.versions import THIS, Version, changed_version, version_at
from tests.support.waiting import wait_until

# Commits with other features than this version: one that has batches and stored responses, but no
# conversations and no background responses; and one that has them all.
WITHOUT_CONVERSATIONS = "59c05457f56aa2792538c3c80208b9dc49a773e0"
WITH_CONVERSATIONS = "d2f4d84d3867b479563c8c3524ef5505c8cf47ea"
RELEASED = "v0.1.0"  # what docs/stability.md promises about upgrades begins with this version
SIMULATED = (
    *("--engine", "simulated", "--replicas", "2", "--cluster", "fleet"),
    *("--simulated-prefill-tokens-per-s", "20000", "--simulated-decode-ms", "20"),
)
VLLM = (
    *("--served-model-name", BUILTIN_MODEL, "--replicas", "1", "--cluster", "fleet"),
    *(
        "--dtype",
        "float32",
        "--kv-cache-memory-mb",
        "256",
        "--max-model-len",
        "4096",
        "--response-store-mb",
        "64",
    ),
)
# The ends of keys without an expiry. Their values stay until clients drop them.
LASTING = {f"prefixes{part}" for part in ("", ":tokens", ":versions", ":hits", ":saved")}
LASTING |= {"prefixes:revision", "adapters:revision"}
OF_A_SLOW_MACHINE = {
    (name, "warning") for name in ("redis", "leases", "hits", "load", "speed", "queue", "logs")
}
OTHER_FORMATS = {  # of records and messages, of fingerprints, and of the wire
    "kvroute/contract/records.py": ("\nVERSION = 1", "\nVERSION = 2"),
    "kvroute/blocks/fingerprint.py": ('"kvroute/2"', '"kvroute/3"'),
    "kvroute/wire/structs.py": ("\nVERSION = 4", "\nVERSION = 5"),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("commit", [WITHOUT_CONVERSATIONS, WITH_CONVERSATIONS, RELEASED])
def test_an_upgrade_and_a_rollback_lose_nothing(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = version_at(commit, tmp_path / "old")
    there_and_back(old, SIMULATED, tmp_path, monkeypatch, is_vllm=False)


@pytest.mark.timeout(2400)
def test_what_vllm_answered_is_stored_through_an_upgrade_and_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses are continued, conversations are read, and background responses end."""
    old = version_at(WITH_CONVERSATIONS, tmp_path / "old")
    options = ("--model", str(terse_model(tmp_path / "model")), *VLLM)
    there_and_back(old, options, tmp_path, monkeypatch, is_vllm=True)


@pytest.mark.timeout(1200)
def test_a_version_with_other_formats_leaves_the_data_of_this_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a version should get another cluster id, and has the same one here by mistake."""
    future = changed_version(tmp_path / "future", OTHER_FORMATS)
    with fleet(tmp_path, *SIMULATED) as shared, Redis.from_url(shared.redis_url) as client:
        monkeypatch.setenv(KEY, shared.keys["operators"])
        with THIS.start(*shared.options) as own:
            shared.add("node1", own)
            declare(shared)
            declared = [client.dump(key) for key in declarations(client)]
            with load(shared, is_vllm=False):
                with future.start(*shared.options) as other:
                    for version, cluster in ((THIS, own), (future, other)):
                        assert_found(version, cluster, "clusters", "records")
                    with shared.operator(other.url) as operator:
                        assert operator.get(f"/v1/prefixes/{PREFIX}").status_code == 404
                        body = {"prompt": [*range(100, 400)], "max_tokens": 3}
                        answers = [operator.post("/v1/completions", json=body) for _ in range(2)]
                    cached = answers[1].raise_for_status().json()["usage"]["prompt_tokens_details"]
                    assert cached["cached_tokens"]
                    assert {each.headers["x-kvroute-replica"] for each in answers} <= (
                        shared.own_replicas(other)
                    )
                assert shared.is_served_by(own)
            assert [client.dump(key) for key in declarations(client)] == declared
            assert_found(THIS, own)
        assert without_expiry(client) <= LASTING


def declarations(client: Redis) -> list[bytes]:
    """Return the keys of the named prefixes, without those of their counts."""
    return sorted([*client.scan_iter("*:prefixes"), *client.scan_iter("*:prefixes:tokens")])


def there_and_back(
    old: Version,
    options: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_vllm: bool,
) -> None:
    with fleet(folder, *options) as upgraded:
        monkeypatch.setenv(KEY, upgraded.keys["operators"])
        with ExitStack() as first, ExitStack() as second, ExitStack() as third:
            before = first.enter_context(old.start(*upgraded.options))
            upgraded.add("node1", before)
            declare(upgraded)
            assert_found(old, before)
            with load(upgraded, is_vllm=is_vllm):
                work = begin(upgraded, is_vllm=is_vllm)
                after = second.enter_context(THIS.start(*upgraded.options))
                switch(upgraded, ("node1", old, before), ("node2", THIS, after))
                work += leave(upgraded, first, work, is_vllm=is_vllm)
                assert upgraded.is_served_by(after)
                work += begin(upgraded, is_vllm=is_vllm)
                again = third.enter_context(old.start(*upgraded.options))
                switch(upgraded, ("node2", THIS, after), ("node1", old, again))
                work += leave(upgraded, second, work, is_vllm=is_vllm)
                assert upgraded.is_served_by(again)
            for each in work:
                each.end(upgraded)
            chats = sum(upgraded.answered[kind] for kind in ("stream", "named", "raw", "message"))
            wait_until(lambda: upgraded.counted("chats", again) == chats)
            assert_found(old, again)
        with Redis.from_url(upgraded.redis_url) as client:
            assert without_expiry(client) <= LASTING


def switch(
    fleet: Fleet, old: tuple[str, Version, Cluster], new: tuple[str, Version, Cluster]
) -> None:
    """Move the clients from one cluster to the other one, which has the same id."""
    for _, version, cluster in (old, new):
        assert_found(version, cluster, "clusters")
        if version is THIS:
            shown = version.run("status", "--url", cluster.url).stdout
            assert "of another deployment with the same --cluster" in " ".join(shown.split())
    fleet.add(new[0], new[2])
    fleet.drain(old[0])
    assert fleet.is_served_by(new[2])
    with fleet.operator(new[2].url) as client:
        assert not cold(client) & fleet.own_replicas(new[2])


def leave(fleet: Fleet, cluster: ExitStack, work: list[Work], *, is_vllm: bool) -> list[BegunBatch]:
    """Stop the cluster that has no clients any more; the other one goes on with its work.

    Returns:
        Batches that have begun just before. Each of the clusters may have begun some of them.
    """
    batches = [BegunBatch(fleet, is_vllm=is_vllm) for _ in range(3)]
    wait_until(lambda: all(each.has_begun(fleet) for each in batches), within_s=START_S)
    assert any(each.is_running(fleet) for each in batches)
    cluster.close()
    for each in [*work, *batches]:
        each.check(fleet)
    return batches


def assert_found(version: Version, cluster: Cluster, *names: str) -> None:
    """Assert that only these checks of the doctor find something, at the latest after a while."""
    with suppress(AssertionError):
        wait_until(lambda: {check.name for check in problems(version, cluster)} == {*names})
    found = problems(version, cluster)
    assert {check.name for check in found} == {*names}, found


def problems(version: Version, cluster: Cluster) -> list[Check]:
    """Return what the doctor has found, without warnings about the speed of this machine."""
    audit = ("--audit",) if version is THIS else ()
    examined = version.run("doctor", *audit, "--json", "--url", cluster.url)
    checks = [Check(**check) for check in json.loads(examined.stdout)]
    found = [check for check in checks if check.grade != "ok"]
    return [check for check in found if (check.name, check.grade) not in OF_A_SLOW_MACHINE]


def without_expiry(client: Redis) -> set[str]:
    """Return the ends of all keys that do not expire."""
    keys = [key.decode() for key in client.scan_iter("*") if client.ttl(key) == -1]
    return {key.rpartition("}:")[2] for key in keys}
