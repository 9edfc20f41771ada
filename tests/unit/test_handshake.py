"""A replica that differs from the routers is seen; it works, and its cache is ignored."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.contract.identity import Identity, identify
from kvroute.contract.records import ReplicaRecord
from kvroute.router.index.handshake import WORDS, Handshake, differences
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.replicas import own_degraded
from tests.support.model_files import change_template, copy_model_files
from tests.support.records import FACTS, LOAD

BLOCK = 4
OURS = Identity("kvroute/1", "", BLOCK, "aaaa", "bbbb")
PROMPT = np.arange(41, dtype=np.uint32)


def record(replica_id: str, **differs: Any) -> ReplicaRecord:
    return ReplicaRecord(
        replica_id, "1", 0, FACTS, LOAD, identity=msgspec.structs.replace(OURS, **differs)
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_model_files(tmp_path)


def test_an_equal_replica_has_no_differences() -> None:
    assert differences(OURS, record("a").identity) == ""


@pytest.mark.parametrize("fact", WORDS)
def test_a_difference_is_named_with_both_values(fact: str) -> None:
    reason = differences(OURS, record("a", **{fact: "other"}).identity)
    mine = getattr(OURS, fact) or "empty"
    assert reason == f"its {fact.replace('_', ' ')} is other, the router's {mine}"


def test_an_adapter_with_other_weights_is_a_difference_but_an_additional_adapter_is_not() -> None:
    ours = msgspec.structs.replace(OURS, variants={"sql": "1111", "law": "2222"})
    assert differences(ours, record("a", variants={"sql": "1111", "poems": "3333"}).identity) == ""
    reason = differences(ours, record("a", variants={"sql": "4444"}).identity)
    assert reason == "its LoRA adapter sql is 4444, the router's 1111"


def test_a_replica_without_an_identity_counts_as_equal() -> None:
    assert differences(OURS, None) == ""


def test_a_degraded_replica_is_logged_once_and_again_when_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handshake, other = Handshake(OURS), record("b", block_size=16)
    with caplog.at_level(logging.WARNING, "kvroute.handshake"):
        for records in ([record("a"), other], [other], [record("b")], [other]):
            handshake.check(records)
    assert [record.getMessage().split()[1] for record in caplog.records] == ["b", "b"]
    assert "its block size is 16, the router's 4" in caplog.text


def test_the_cache_of_a_degraded_replica_is_ignored() -> None:
    fleet = Fleet(
        model="m", revision="", block_size=BLOCK, rng=random.Random(0), handshake=Handshake(OURS)
    )
    fleet.mirror.join("a")
    fleet.mirror.add("a", fleet.caches.chain(PROMPT))
    fleet.update([record("a"), record("b")])
    assert fleet.place(PROMPT, ["a", "b"], 0.0).candidate("a").hit_blocks == 10
    fleet.update([record("a", template_digest="cccc"), record("b")])
    placement = fleet.place(PROMPT, ["a", "b"], 0.0)
    assert placement.best_hit_blocks == placement.candidate("a").hit_blocks == 0
    assert {each.replica_id for each in placement.ranking} == {"a", "b"}
    assert fleet.sent(placement, "a", "r", 0.0).dispatch.expected.blocks == ()


@pytest.mark.parametrize(
    ("running", "reported"), [([], {"a", "b"}), (["a"], {"a"}), (["c"], set())]
)
def test_of_another_deployment_no_degraded_replica_is_reported(
    running: list[str], reported: set[str]
) -> None:
    """An upgraded cluster may have another template than the old one, which has the same id."""
    fleet = Fleet(
        model="m",
        revision="",
        block_size=BLOCK,
        rng=random.Random(0),
        handshake=Handshake(OURS),
        running=lambda: running,
    )
    fleet.update([record(id_, template_digest="cccc") for id_ in ("a", "b")])
    assert fleet.replicas.degraded.keys() == {"a", "b"}
    assert own_degraded(fleet.replicas).keys() == reported
    assert {record.id for record in fleet.replicas.own_records} == reported


def test_the_identity_of_a_model_folder_comes_from_its_files(model: Path) -> None:
    first = identify(str(model), revision="r1", block_size=32)
    assert first == identify(str(model), revision="r1", block_size=32)
    assert len(first.tokenizer_digest) == len(first.template_digest) == 16
    change_template(model)
    second = identify(str(model), revision="r1", block_size=32)
    assert second.template_digest != first.template_digest
    assert second.tokenizer_digest == first.tokenizer_digest


def test_the_chat_template_may_be_in_the_configuration_of_the_tokenizer(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert identify(str(model), revision="", block_size=32).template_digest == ""
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ hi }}"}))
    assert identify(str(model), revision="", block_size=32).template_digest != ""


def test_a_model_without_local_files_has_empty_digests(tmp_path: Path) -> None:
    identity = identify(str(tmp_path), revision="", block_size=32)
    assert (identity.tokenizer_digest, identity.template_digest) == ("", "")
