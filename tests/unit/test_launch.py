"""A start that cannot succeed is refused with what to write instead."""

import importlib.util
import socket

import pytest

from kvroute.deployments import final_error
from kvroute.local.launch import gpus_per_replica, refuse_missing_engine, refuse_taken_port
from kvroute.local.ports import free_port
from kvroute.local.progress import StartError
from kvroute.settings.owned_engine_args import options_for
from kvroute.settings.serve import ServeSettings, load


def test_a_taken_port_is_refused_with_another_one() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 .* try --port 2"):
            refuse_taken_port("127.0.0.1", port)


def test_a_gpu_each_where_there_are_some_and_none_for_the_simulation() -> None:
    assert gpus_per_replica([load({})], available=8) == [1]
    assert gpus_per_replica([load({})], available=0) == [0]
    assert gpus_per_replica([load({"engine": "simulated"})], available=8) == [0]


def test_each_rank_gets_a_gpu_where_there_are_some() -> None:
    ranks = load({"data_parallel_size": 4})
    assert gpus_per_replica([ranks], available=8) == [4]
    assert gpus_per_replica([ranks], available=0) == [0]
    with pytest.raises(StartError, match="2 replicas of 4 GPUs need 8, and 7 can be used"):
        gpus_per_replica([ranks], available=7)


def test_an_error_that_every_start_would_repeat_is_told_apart() -> None:
    error = "kvroute.contract.generation.CannotRunError: ValueError: no room for max_model_len"
    assert final_error(f"Traceback\n\x1b[36m  File\x1b[39m\n{error}") == error.split(": ", 1)[1]
    assert options_for(final_error(error)) == "--max-model-len"
    assert [final_error(other) for other in ("", "x\nValueError: y")] == ["", ""]
    assert options_for("the model is too large") == ""


def test_more_gpus_than_there_are_are_refused() -> None:
    with pytest.raises(StartError, match="2 replicas of 4 GPUs need 8, and 7 can be used"):
        gpus_per_replica([load({"gpus_per_replica": 4})], available=7)


def test_all_models_together_may_not_need_more_gpus_than_there_are() -> None:
    large, small = load({"gpus_per_replica": 2}), load({"replicas": 3})
    assert gpus_per_replica([large, small], available=7) == [2, 1]
    with pytest.raises(StartError, match="2 replicas of 2 GPUs and 3 replicas of 1 GPUs need 7"):
        gpus_per_replica([large, small], available=6)


def test_there_must_be_gpus_for_as_many_replicas_as_there_may_be() -> None:
    with pytest.raises(StartError, match=r"4 replicas of 1 GPUs need 4, and 2 .* --max-replicas"):
        gpus_per_replica([load({"replicas": 2, "max_replicas": 4})], available=2)


def test_a_cluster_of_vllm_engines_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refuse_missing_engine(ServeSettings(engine="simulated").each)
    with pytest.raises(StartError, match=r"pip install 'kvroute\[gpu\]'"):
        refuse_missing_engine(ServeSettings().each)
