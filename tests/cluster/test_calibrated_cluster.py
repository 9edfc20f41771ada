"""`kvroute calibrate` measures a cluster of known speed."""

import json
import threading
from pathlib import Path

import httpx
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.replay.profiles import Profile, load_profile
from tests.support.serving import Cluster


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_a_cluster_of_known_speed_is_measured_and_replayed(slow: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    result = run("calibrate", "--url", slow.url, "--output", path)
    assert result.exit_code == 0, result.output
    assert "residual error" in result.stderr
    assert "of others" not in result.stderr
    profile = load_profile(str(path))
    assert 0.5 < profile.prefill_tokens_per_s / 10_000 < 1.6
    assert 0.7 < profile.step_s / 0.010 < 1.5
    assert profile.kv_tokens == 4096 * 32
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
            body = {"prompt": [*range(500, 550)], "max_tokens": 400, "ignore_eos": True}
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
