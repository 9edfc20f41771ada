"""`kvroute calibrate` measures a cluster of known speed."""

import json
import threading
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.replay.calibration.profiles import Profile, load_profile
from tests.support.serving import Cluster

TRIES = 3  # a busy machine spoils one


@pytest.fixture(autouse=True)
def one_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.replay.calibration.measure.REPETITIONS", 1)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def measured(cluster: Cluster, path: Path) -> Profile:
    """It is in the file as well."""
    result = run("calibrate", "--url", cluster.url, "--output", path)
    assert result.exit_code == 0, result.output
    assert "residual error" in result.stderr
    assert "of others" not in result.stderr
    return load_profile(str(path))


def is_right(profile: Profile) -> bool:
    speed, step = profile.prefill_tokens_per_s / 2000, profile.step_s / 0.040
    return 0.5 < speed < 1.6 and 0.7 < step < 1.5


def test_a_cluster_of_known_speed_is_measured_and_replayed(slow: Cluster, tmp_path: Path) -> None:
    path, found = tmp_path / "measured.json", list[Profile]()
    while not found or not is_right(found[-1]):
        assert len(found) < TRIES, found
        found.append(measured(slow, path))
    assert found[-1].kv_tokens == 4096 * 32
    trace = tmp_path / "trace.jsonl"
    lines = (
        f'{{"timestamp": {t}, "input_length": 9, "output_length": 9, "hash_ids": [0]}}\n'
        for t in (0, 9)
    )
    trace.write_text("".join(lines))
    assert run("replay", trace, "--speed", 1, "--engine", path).exit_code == 0


def test_requests_of_others_are_noticed(slow: Cluster) -> None:
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            body = {"prompt": [*range(500, 550)], "max_tokens": 50, "ignore_eos": True}
            httpx.post(f"{slow.url}/v1/completions", json=body, timeout=60)

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in threads:
        thread.start()
    result = run("calibrate", "--url", slow.url)
    over.set()
    for thread in threads:
        thread.join()
    assert "requests of others ran meanwhile" in result.stderr
    assert list(json.loads(result.stdout)) == list(Profile.model_fields)


def test_a_model_that_is_not_served_is_named(slow: Cluster) -> None:
    result = run("calibrate", "--url", slow.url, "--model", "gpt-5")
    assert result.exit_code == 1
    assert "--model is 'gpt-5'; name one that the cluster serves: m" in result.stderr
