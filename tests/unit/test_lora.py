"""Which LoRA adapters there are; requests go where theirs is loaded, unless that is busy."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.blocks.chain import Scope
from kvroute.blocks.variants import VariantCache
from kvroute.contract.adapters import Adapter, digests, read_adapter, sufficient_rank
from kvroute.contract.identity import Identity
from kvroute.contract.records import Load, ReplicaRecord
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate, prices, rank
from kvroute.router.placement.receipts import receipt
from kvroute.settings.help import SettingsError
from kvroute.settings.serve import load
from tests.support.adapters import write_adapter
from tests.support.records import facts

PROMPT = np.arange(100, dtype=np.uint32)  # 0.1 s of prefill, in those facts


def record(replica_id: str, *loras: str, **differs: Any) -> ReplicaRecord:
    return ReplicaRecord(replica_id, "1", 0, facts(**differs), Load(variants=loras, setup_s=2.0))


def knowing(replica_id: str, **adapters: str) -> ReplicaRecord:
    identity = Identity("kvroute/1", "", 4, "", "", adapters)
    return msgspec.structs.replace(record(replica_id), identity=identity)


def fleet_of(*records: ReplicaRecord, observer: RequestObserver | None = None) -> Fleet:
    fleet = Fleet(
        model="m",
        revision="",
        block_size=4,
        rng=random.Random(0),
        observer=observer or RequestObserver(),
    )
    fleet.update(records)
    for each in records:
        fleet.mirror.join(each.id)
    return fleet


def send(fleet: Fleet, lora: str, now_s: float, request_id: str = "r") -> Attempt:
    running = [each.id for each in fleet.replicas.records]
    placement = fleet.place(PROMPT, running, now_s, Scope(lora))
    return fleet.sent(placement, placement.ranking[0].replica_id, request_id, now_s)


def test_the_replica_that_has_the_adapter_is_chosen() -> None:
    fleet = fleet_of(record("a"), record("b", "sql"), record("c", "law"))
    assert {send(fleet, "sql", 10.0 * i, str(i)).replica_id for i in range(5)} == {"b"}


def test_a_long_queue_outweighs_the_time_to_load_an_adapter_on_another_replica() -> None:
    def chosen(backlog_s: float) -> str:
        loaded = Candidate("loaded", 0, backlog_s, own_s=0.1)
        idle = [Candidate(name, 0, 0.0, own_s=0.1, setup_s=2.0) for name in "abc"]
        fleet = [loaded, *idle]
        return rank(fleet, rng=random.Random(0), prices=prices(fleet, busy_s=1.0))[0].replica_id

    assert chosen(1.5) == "loaded"
    assert chosen(2.5) in "abc"


def test_a_burst_follows_its_leader_to_where_the_adapter_is_being_loaded() -> None:
    fleet = fleet_of(record("a"), record("b"), record("c"))
    leader = send(fleet, "sql", 0.0, "leader")
    assert leader.dispatch.loads_first
    follower = send(fleet, "sql", 0.1, "follower")
    assert follower.replica_id == leader.replica_id
    assert not follower.dispatch.loads_first


def test_from_its_third_report_on_only_the_replicas_own_word_counts() -> None:
    fleet = fleet_of(record("a"))
    send(fleet, "sql", 0.0).end()
    loads = []
    for _ in range(3):
        fleet.update([record("a")])
        loads.append(fleet.place(PROMPT, ["a"], 1.0, Scope("sql")).candidate("a").setup_s)
    assert loads == [0.0, 0.0, 2.0]


def test_a_dispatched_adapter_evicts_another_one_from_a_full_memory() -> None:
    fleet = fleet_of(record("a", "sql", max_variants=1))
    send(fleet, "law", 0.0)
    assert send(fleet, "sql", 0.1, "back").dispatch.loads_first


def test_loading_is_part_of_the_backlog_but_does_not_change_the_learned_speed() -> None:
    fleet = fleet_of(record("a"))
    attempt = send(fleet, "sql", 0.0)
    assert fleet.loads.backlogs_s(["a"], 0.0) == pytest.approx([2.1], rel=0.01)
    attempt.first_token(9.0)
    assert attempt.load.speed.slowness == 1.0
    assert fleet.loads.backlogs_s(["a"], 9.0) == [0.0]


def test_other_routers_hear_where_an_adapter_is_being_loaded() -> None:
    peer_publisher = PeerPublisher()
    mine, other = (
        fleet_of(record("a"), record("b"), observer=each) for each in (peer_publisher, None)
    )
    there = send(mine, "sql", 0.0).replica_id
    PeerSubscriber(other, own="other", clock=lambda: 0.0).receive(peer_publisher.next_message())
    attempt = send(other, "sql", 0.1, "theirs")
    assert (attempt.replica_id, attempt.dispatch.loads_first) == (there, False)


def test_a_replica_without_the_adapter_gets_none_of_its_requests() -> None:
    fleet = fleet_of(knowing("old"), knowing("new", sql="1f"))
    placement = fleet.place(PROMPT, ["old", "new"], 0.0, Scope("sql"))
    assert [candidate.replica_id for candidate in placement.ranking] == ["new"]
    assert len(fleet.place(PROMPT, ["old", "new"], 0.0).ranking) == 2


def test_an_adapters_blocks_are_no_hits_for_the_model_or_another_adapter() -> None:
    fleet = fleet_of(record("a", "sql", "law"))
    fleet.mirror.add("a", fleet.caches.chain(PROMPT, Scope("sql")))
    hits = {
        lora: fleet.place(PROMPT, ["a"], 0.0, Scope(lora)).candidate("a").hit_blocks
        for lora in ("", "sql", "law")
    }
    assert hits == {"": 0, "sql": 24, "law": 0}


def test_a_receipt_shows_the_adapter_and_what_loading_it_would_cost() -> None:
    fleet = fleet_of(record("a"), record("b", "sql"), record("c"))
    shown = receipt(fleet.place(PROMPT, ["a", "b", "c"], 0.0, Scope("sql")), policy="kvroute")
    assert (shown["lora"], shown["choice"]) == ("sql", "b")
    assert {each["id"]: each["terms_s"]["setup"] for each in shown["replicas"]} == {
        "a": 2.0,
        "b": 0.0,
        "c": 2.0,
    }
    assert shown["reason"] == "it has loaded the LoRA adapter; loading it on c would take 2 s"


def test_the_least_recently_used_adapter_leaves_a_full_memory() -> None:
    residents = VariantCache(2)
    assert [residents.use(name) for name in "abacab"] == [True, True, False, True, False, True]
    assert residents.names == ("a", "b")


def test_adapters_are_named_with_their_folders(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", seed=1)
    (settings,) = load({"lora": [f"sql={folder}"], "redis_url": "redis://r"}).resolve()
    assert settings.adapters == (Adapter(name="sql", path=str(folder)),)
    assert settings.for_routers()["adapters"] == settings.for_replicas()["adapters"]


def test_the_environment_parts_adapters_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_adapter(tmp_path / name, seed=1) for name in "ab"]
    monkeypatch.setenv("KVROUTE_LORA", f"a={folders[0]},b={folders[1]}")
    assert [adapter.name for adapter in load({}).adapters] == ["a", "b"]


def test_a_relative_folder_is_found_by_processes_that_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "sql", seed=1)
    monkeypatch.chdir(tmp_path)
    assert load({"lora": ["sql=sql"]}).lora == [f"sql={tmp_path / 'sql'}"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sql"], "expected NAME=PATH, such as sql=adapters/sql"),
        (["sql=PATH/nowhere"], "nowhere/adapter_config.json cannot be read"),
        (["sql=PATH/empty"], r"there is no adapter_model\.safetensors"),
        (["sql=PATH/huge"], "the adapter's rank is 1024, and vLLM supports ranks up to 512"),
        (["sql=PATH/other"], "has the rank None; a LoRA adapter has a rank of 1 or more"),
        (["sql=PATH/good", "sql=PATH/good"], "the name 'sql' is already used"),
        (["m=PATH/good"], "the name 'm' is already used"),
    ],
)
def test_an_adapter_that_cannot_be_used_stops_the_start(
    tmp_path: Path, names: list[str], message: str
) -> None:
    write_adapter(tmp_path / "good", seed=1)
    write_adapter(tmp_path / "empty", seed=1).joinpath("adapter_model.safetensors").unlink()
    for name, config in (("huge", '{"r": 1024}'), ("other", "{}")):
        write_adapter(tmp_path / name, seed=1).joinpath("adapter_config.json").write_text(config)
    given = [name.replace("PATH", str(tmp_path)) for name in names]
    with pytest.raises(SettingsError, match=f"--lora is '.*{message}"):
        load({"lora": given, "served_model_name": "m"})


def test_several_models_have_adapters_of_their_own(tmp_path: Path) -> None:
    sql = [f"sql={write_adapter(tmp_path / 'sql', seed=1)}"]
    models = [{"model": "a", "lora": sql}, {"model": "b"}]
    assert [len(each.adapters) for each in load({"models": models}).per_model] == [1, 0]
    with pytest.raises(SettingsError, match="there are several models; move it to"):
        load({"models": models, "lora": sql})
    with pytest.raises(SettingsError, match="are both served as 'sql'"):
        load({"models": [*models, {"model": "sql"}]})


def test_engines_make_room_for_the_highest_rank(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(rank), seed=1, rank=rank) for rank in (4, 9)]
    adapters = [read_adapter(f"{folder.name}={folder}") for folder in folders]
    assert [sufficient_rank(adapters[:1]), sufficient_rank(adapters)] == [8, 16]


def test_engines_make_room_for_the_highest_rank_of_adapters_that_are_added_later() -> None:
    assert [sufficient_rank([], at_least=rank) for rank in (1, 16, 33, 512)] == [8, 16, 64, 512]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_root": "/nowhere"}, "--lora-root is '/nowhere', which is not a folder"),
        ({"engine_hooks": "off"}, "and --engine-hooks is off; leave one of them out"),
        ({"attach": ["http://127.0.0.1:1"]}, "--lora-root does not work with --attach"),
        ({"max_lora_rank": 1024}, "--max-lora-rank is 1024"),
    ],
)
def test_a_folder_of_adapters_that_cannot_be_used_stops_the_start(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load({"lora_root": str(tmp_path), **options})


def test_routers_and_replicas_know_the_folder_of_adapters(tmp_path: Path) -> None:
    (settings,) = load({"lora_root": str(tmp_path), "redis_url": "redis://r"}).resolve()
    assert settings.for_routers()["lora_root"] == str(tmp_path)
    assert settings.for_replicas()["lora_root"] == str(tmp_path)


def test_a_replica_that_has_loaded_no_adapter_yet_counts_as_fast_as_the_others() -> None:
    measured = [
        msgspec.structs.replace(record(name), load=Load(setup_s=seconds))
        for name, seconds in (("a", 0.01), ("b", 0.03), ("c", 0.02))
    ]
    unmeasured = msgspec.structs.replace(record("new"), load=Load())
    fleet = fleet_of(*measured, unmeasured)
    placement = fleet.place(PROMPT, ["a", "b", "c", "new"], 0.0, Scope("sql"))
    assert placement.candidate("new").setup_s == 0.02


def test_adapters_are_the_same_when_their_files_are(tmp_path: Path) -> None:
    one, same, other = (
        digests([read_adapter(f"x={write_adapter(tmp_path / name, seed=seed)}")])
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same != other
    assert digests([Adapter(name="x", path=str(tmp_path / "nowhere"))]) == {"x": ""}
