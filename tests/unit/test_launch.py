"""kvroute serve refuses a start that cannot succeed, and says which options to change."""

import importlib.util
import io
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import ReplicaState
from rich.console import Console

from kvroute.deployments import REPLICAS, final_error, short
from kvroute.features.feature import Feature
from kvroute.local import launch
from kvroute.local.before_start import (
    check_access,
    check_engine_installed,
    check_log_dir,
    check_port,
    check_tls,
    gpus_per_replica,
    too_few_gpus,
    waiting_for_gpus,
)
from kvroute.local.ports import free_port
from kvroute.local.progress import StartProgress
from kvroute.local.ray_cluster import LostProcesses, start_problem
from kvroute.machine.problem import StartError
from kvroute.process.hub import check_on_hub
from kvroute.settings.owned_engine_args import options_for
from kvroute.settings.router import RouterSettings
from kvroute.settings.serve import ServeSettings, load
from tests.support.certificates import certificate


def test_a_taken_port_is_refused_and_a_free_one_is_suggested() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} of 127.0.0.1 .* try --port 2"):
            check_port("127.0.0.1", port)


def test_a_ray_that_cannot_start_is_not_taken_for_a_port_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ray_that_fails(*_: object, **__: object) -> None:
        raise StartError("Ray cannot start: the dashboard has ended")

    monkeypatch.setattr(launch, "local_ray", ray_that_fails)
    for step in ("examine", "check_own_redis", "_model"):
        monkeypatch.setattr(launch, step, lambda *_: "")
    port, lost = free_port(), LostProcesses(tmp_path, StartProgress())
    settings = load({"engine": "simulated", "port": port, "redis_url": "redis://127.0.0.1:1"})
    signals: Any = SimpleNamespace(sleep=time.sleep)
    with ExitStack() as running, pytest.raises(StartError, match="the dashboard has ended"):
        launch._start(settings, tmp_path, signals, StartProgress(), lost, running)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    check_access(host, None, insecure=False)


class Closing(Feature):
    """A feature that may close the gate."""

    def gate(self, settings: RouterSettings) -> None:
        return None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_keys_or_insecure(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.local.before_start.FEATURES", (Closing(),))
    with pytest.raises(
        StartError, match=r"other machines can reach, .* --api-keys FILE .* --insecure"
    ):
        check_access(host, None, insecure=False)
    check_access(host, None, insecure=True)
    check_access(host, tmp_path / "keys.json", insecure=False)


def test_keys_that_no_feature_checks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.local.before_start.FEATURES", ())
    for insecure in (False, True):
        with pytest.raises(StartError, match="no feature that checks API keys"):
            check_access("127.0.0.1", tmp_path / "keys.json", insecure=insecure)


def test_a_certificate_needs_its_own_key(tmp_path: Path) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    check_tls(None, None)
    check_tls(*one)
    for cert, key, why in (
        (one[0], None, "belong together"),
        (None, one[1], "belong together"),
        (one[0], other[1], "KEY_VALUES_MISMATCH"),
        (tmp_path / "none.pem", one[1], "No such file"),
    ):
        with pytest.raises(StartError, match=why):
            check_tls(cert, key)


def test_a_replica_gets_one_gpu_if_there_is_one_and_a_simulated_replica_none() -> None:
    assert gpus_per_replica([load({})], available=8) == [1]
    assert gpus_per_replica([load({})], available=0) == [0]
    assert gpus_per_replica([load({"engine": "simulated"})], available=8) == [0]


def test_each_rank_gets_a_gpu_if_there_is_one() -> None:
    ranks = load({"data_parallel_size": 4})
    assert gpus_per_replica([ranks], available=8) == [4]
    assert gpus_per_replica([ranks], available=0) == [0]


def test_an_error_that_every_start_would_repeat_is_final() -> None:
    error = "kvroute.contract.generation.CannotRunError: ValueError: no room for max_model_len"
    assert final_error(f"Traceback\n\x1b[36m  File\x1b[39m\n{error}") == error.split(": ", 1)[1]
    assert options_for(final_error(error)) == "--max-model-len"
    assert [final_error(other) for other in ("", "x\nValueError: y")] == ["", ""]
    assert options_for("the model is too large") == ""


def test_a_cluster_starts_with_the_replicas_that_have_gpus() -> None:
    models = [load({"gpus_per_replica": 4, "replicas": 3})]
    assert gpus_per_replica(models, available=11) == [4]
    (problem,) = too_few_gpus(models, available=11)
    assert problem.text.startswith("the fleet needs 12 GPUs for 3 replicas of 4 GPUs, and")
    assert "has 11 that can be used; at most 2 replicas can run" in problem.text
    assert waiting_for_gpus(models, available=11) == {REPLICAS: 1}
    assert waiting_for_gpus(models, available=12) == {}


def test_a_cluster_without_gpus_for_one_replica_is_refused() -> None:
    with pytest.raises(StartError, match=r"8 GPUs for 2 replicas of 4 GPUs, .* has 3"):
        gpus_per_replica([load({"gpus_per_replica": 4})], available=3)


def test_all_models_together_may_not_need_more_gpus_than_available() -> None:
    large, small = load({"gpus_per_replica": 2}), load({"replicas": 3})
    assert gpus_per_replica([large, small], available=7) == [2, 1]
    with pytest.raises(StartError, match="7 GPUs for 2 replicas of 2 GPUs and 3 replicas of 1 GPU"):
        gpus_per_replica([large, small], available=6)


def test_too_few_gpus_for_the_largest_number_of_replicas_are_a_warning() -> None:
    models = [load({"replicas": 2, "max_replicas": 4})]
    (problem,) = too_few_gpus(models, available=2)
    assert "4 GPUs for 4 replicas of 1 GPU" in problem.text
    assert "lower --max-replicas" in problem.text
    assert waiting_for_gpus(models, available=2) == {}


def test_a_cluster_of_vllm_engines_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_engine_installed(ServeSettings(engine="simulated").per_model)
    with pytest.raises(StartError, match=r"pip install 'kvroute\[gpu\]'"):
        check_engine_installed(ServeSettings().per_model)


def test_a_folder_for_logs_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"--log-dir is '.*, which is not writable"):
        check_log_dir(tmp_path / "file/logs")


def test_a_model_that_the_hub_cannot_deliver_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'no/such-model', which is neither .* HF_HUB_OFFLINE"):
        check_on_hub("no/such-model")


def test_a_folder_is_not_asked_for_on_the_hub(tmp_path: Path) -> None:
    check_on_hub(str(tmp_path))


KILLED = "A worker died or was killed.\nWorker ID: ab Worker PID: 417 Worker exit type: X"


def in_serve(id_: str, pid: int, state: str = "RUNNING") -> dict[str, Any]:
    log = f"/serve/replica_{id_}.log"
    return {"replica_id": id_, "pid": pid, "state": ReplicaState(state), "log_file_path": log}


def replicas(*listed: dict[str, Any]) -> dict[str, Any]:
    return {"Replica": {"target_num_replicas": 2, "replicas": listed}}


def test_a_replica_that_ends_is_named_and_so_is_the_one_in_its_place_when_it_is_ready() -> None:
    output = io.StringIO()
    lost = LostProcesses(Path("/logs"), StartProgress(Console(file=output, soft_wrap=True)))
    a, b, c = in_serve("a", 400), in_serve("b", 417), in_serve("c", 500)
    lost.receive(KILLED)
    lost.report(replicas(a, b))  # Serve has not noticed yet
    lost.report(replicas(a, in_serve("c", 500, "STARTING")))
    ended = output.getvalue()
    assert "replica b (process 417) has ended unexpectedly; Ray Serve starts another" in ended
    assert "/logs/serve/replica_b.log" in ended
    for _ in range(2):
        lost.report(replicas(a, c))
    later = output.getvalue().removeprefix(ended)
    assert later.endswith("replica c is ready; 2 of 2 replicas are ready\n")
    assert later.count("is ready;") == 1


@pytest.mark.parametrize(
    ("actor", "name"),
    [
        ("ServeController", "Ray Serve's controller"),
        ("ServeReplica:kvroute:Replica:m=2Fa", "replica of m/a"),
        ("Unknown", "process"),
    ],
)
def test_an_ended_process_that_serve_does_not_know_is_named_by_its_output(
    tmp_path: Path, actor: str, name: str
) -> None:
    (tmp_path / "worker-ab-01-417.err").write_text(f":job_id:01\n:actor_name:{actor}\nx\n")
    output = io.StringIO()
    lost = LostProcesses(tmp_path, StartProgress(Console(file=output, soft_wrap=True)))
    lost.receive(KILLED)
    lost.report(replicas())
    assert f"{name} (process 417) has ended unexpectedly; Ray replaces it" in output.getvalue()


def test_ray_need_not_say_that_it_repeats_a_call() -> None:
    output = io.StringIO()
    lost = LostProcesses(Path("/logs"), StartProgress(Console(file=output)))
    lost.receive(
        "Task ServeController.listen_for_change failed. There are infinite retries remaining, so "
        "the task will be retried. Error: The actor is temporarily unavailable."
    )
    assert output.getvalue() == ""


def test_the_end_of_a_start_says_in_kvroutes_words_what_is_not_ready() -> None:
    waits = "Deployment 'Replica' in application 'kvroute' has 1 replicas that have taken more"
    fails = "The deployment failed to start 3 times in a row. See controller logs. Error:\n"
    states = {"STARTING": 1}
    status = SimpleNamespace(
        deployments={
            "Replica": SimpleNamespace(message=f"{waits} to be scheduled.", replica_states=states),
            "Router": SimpleNamespace(
                message=f"{fails}\x1b[36mTraceback:\n  at x\nValueError: no\x1b[39m",
                replica_states=states,
            ),
        }
    )
    assert start_problem(status) == (
        "not ready: 1 of 1 replicas, which load the model; 1 of 1 routers\n"
        "replicas: some wait for a process, or for free GPUs or CPUs\n"
        "routers cannot start:\nTraceback:\n  at x\nValueError: no"
    )


def test_a_message_of_ray_becomes_one_line() -> None:
    assert short("\x1b[36mThe node is full\x1b[39m\nmore") == "Ray: The node is full"
