"""A machine whose memory other programs have filled."""

from pathlib import Path

import httpx
import psutil

from tests.support.serving import start_cluster


def test_a_cluster_lives_on_when_other_programs_fill_the_memory() -> None:
    """Ray takes the memory for full when 1% of it is in use, which other programs always are."""
    with start_cluster(
        "--engine", "simulated", env={"RAY_memory_usage_threshold": "0.01"}
    ) as cluster:
        body = {"model": "SmolLM2-135M-Instruct", "prompt": "Who is there?", "max_tokens": 5}
        answers = [httpx.post(f"{cluster.url}/v1/completions", json=body) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert "has ended" not in cluster.output()
        # The kernel ends a process by its size and by this number, when no memory is left.
        rank = oom_score(psutil.Process())
        assert {oom_score(process) for process in cluster.processes()} == {rank}


def oom_score(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/oom_score_adj").read_text()
