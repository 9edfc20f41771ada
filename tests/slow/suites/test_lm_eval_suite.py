"""EleutherAI's lm-evaluation-harness, with two small tasks of ours in `lm_eval_tasks`."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.environments import environment
from tests.support.suites import PLUGINS, SUITE_TIMEOUT_S, Servers

TASKS = ("choices", "written")


def evaluated(url: str, model: Path, python: Path, folder: Path) -> dict[str, Any]:
    """Return the scores of the model at this address, and each answer by its task."""
    shutil.copytree(PLUGINS / "lm_eval_tasks", folder)
    server = f"model={BUILTIN_MODEL},base_url={url}/v1/completions,max_retries=1"
    done = subprocess.run(
        [
            *(str(python), "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", f"{server},tokenizer={model},tokenized_requests=True"),
            *("--include_path", ".", "--tasks", ",".join(TASKS)),
            *("--output_path", "results", "--log_samples"),
        ],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = folder.glob("results/*/results_*.json")
    answers = {
        task: [json.loads(line)["resps"] for line in lines.read_text().splitlines()]
        for task in TASKS
        for lines in folder.glob(f"results/*/samples_{task}_*.jsonl")
    }
    return {"scores": json.loads(results.read_text())["results"], "answers": answers}


@pytest.mark.timeout(3 * SUITE_TIMEOUT_S)
def test_scores_are_those_of_vllms_server(
    servers: Servers, suite_model: Path, tmp_path: Path
) -> None:
    python = environment("lm-eval")
    kvroute = evaluated(servers.kvroute, suite_model, python, tmp_path / "kvroute")
    stock = evaluated(servers.stock, suite_model, python, tmp_path / "stock")
    print(kvroute["scores"])
    assert kvroute["scores"] == stock["scores"]
    assert {task: len(answers) for task, answers in stock["answers"].items()} == {
        "choices": 4,
        "written": 4,
    }
    assert kvroute["answers"]["written"] == stock["answers"]["written"]
    assert numbers(kvroute) == pytest.approx(numbers(stock), rel=1e-4)


def numbers(evaluation: dict[str, Any]) -> list[float]:
    """Return the log-likelihood of each choice."""
    answers = evaluation["answers"]["choices"]
    return [float(likelihood) for answer in answers for ((likelihood, _),) in answer]
