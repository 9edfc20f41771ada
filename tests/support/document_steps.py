"""The commands and programs in the documents: which of them tests run, and how."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvroute.replay.workload.trace import BLOCK_TOKENS
from tests.support.documents import (
    CLIENTS,
    DOCUMENTS,
    ROOT,
    Block,
    steps,
    words,
)
from tests.support.printed import is_as_shown
from tests.support.request_logs import write_log
from tests.support.serving import KVROUTE, Cluster

LANGUAGES = {"sh", "python", "text", "yaml", "json", "toml", "diff", "mermaid"}
CURL = 'curl "$KVROUTE_URL'

ITS_OWN = "starts a cluster of its own"
GPUS = "needs GPUs and downloads a model"
MINUTES = "measures for minutes"
CLOUD = "needs machines: test_deploy.py checks the files, test_nodes.py runs them"
IMAGES = (
    "needs a container runtime: test_containers.py checks the files, tests/slow/image runs them"
)
BALANCER = (
    "needs the nodes' addresses in its file: test_load_balancers.py fills them in and runs it"
)
PROMETHEUS = "test_dashboards.py runs it on a port of its own, where Prometheus is installed"
GRAFANA = "needs Grafana: test_dashboards.py checks the files"

HERE = {"curl", "kvroute"}  # programs whose commands are run, except those in NOT_HERE

# Commands that are not run: first words of the command -> reason.
NOT_HERE = {
    "make serve": "tests/support/serving.py starts such a cluster for every test of a cluster",
    "make test": "runs these tests",
    "make test-all": "runs these tests",
    "make image-test": "takes minutes: tests/slow/image has these tests",
    "make release": "takes hours",
    "make setup GPU=1": GPUS,
    "git pull": "the tests run in a checkout",
    "source .venv/bin/activate": "the tests' shell finds kvroute in a folder of its own",
    "make serve ARGS=--model Qwen/Qwen3-8B --replicas 4": GPUS,
    "make bench": f"{MINUTES}: test_bench.py runs its parts",
    "make bench-engines": MINUTES,
    "make gpu-check": GPUS,
    "make bench-prefixes": MINUTES,
    "make bench-policies": f"{MINUTES}: test_policy_matrix.py runs its parts",
    "kvroute serve --lora": f"{ITS_OWN}: test_served_adapters.py has one",
    "kvroute serve --lora-root": f"{ITS_OWN}: test_adapters_cluster.py has one",
    "kvroute adapters add": f"{ITS_OWN}: test_adapters_cluster.py has one",
    "kvroute adapters remove": f"{ITS_OWN}: test_adapters_cluster.py has one",
    "curl $KVROUTE_URL/v1/load_lora_adapter": f"{ITS_OWN}: test_adapters_cluster.py has one",
    "kvroute serve --wire-tls": f"{ITS_OWN}: test_wire_tls.py has one",
    "kvroute serve --api-keys": f"{ITS_OWN}: test_api_keys.py has one",
    "kvroute serve --metrics-token-file": f"{ITS_OWN}: test_inside.py has one",
    "KVROUTE_METRICS_TOKEN_FILE=metrics-token kvroute doctor": f"{ITS_OWN}: test_inside.py has one",
    "kvroute tenants": f"{ITS_OWN}: test_api_keys.py has one",
    "kvroute serve --model Qwen/Qwen3-8B": GPUS,
    "kvroute serve --model openai/whisper-large-v3-turbo": GPUS,
    "kvroute serve --model MODEL --replicas 16 --slo-tpot-ms": GPUS,
    "kvroute serve --models": GPUS,
    "kvroute serve --replicas 2 --data-parallel-size": GPUS,
    "kvroute serve --engine-args": GPUS,
    "kvroute serve --engine-arg runner=pooling": f"{ITS_OWN}: test_seeing_and_embedding.py has one",
    "kvroute serve --request-log": f"{ITS_OWN}: test_request_log.py has one",
    "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 kvroute serve": (
        f"{ITS_OWN}: test_telemetry.py has one"
    ),
    "kvroute attach": f"{ITS_OWN}: test_attached_cluster.py has one",
    "kvroute serve --attach": f"{ITS_OWN}: test_mixed_fleet.py has one",
    "vllm serve": f"{ITS_OWN}: test_attached_cluster.py starts such servers",
    "kvroute scale": "would take a replica from other tests: test_rollout.py runs it",
    "kvroute replay rollouts.jsonl": f"{MINUTES}: test_replay_at_once.py replays fewer sessions",
    ".venv/bin/vllm bench serve": f"{MINUTES}: test_bench_serve.py runs it",
    "ray up": CLOUD,
    "ray exec": CLOUD,
    "ray down": CLOUD,
    "serve deploy": CLOUD,
    "(umask": "makes a secret in a file that stays",
    "docker compose": IMAGES,
    "docker build": IMAGES,
    "docker run": "needs a container runtime: tests/slow/image runs it with podman",
    "kubectl apply": "needs Kubernetes: test_kubernetes.py checks the files",
    "password=$(openssl": "is for the next command",
    "kubectl create secret": "needs Kubernetes: test_kubernetes.py runs it without one",
    "haproxy": BALANCER,
    "nginx": BALANCER,
    "prometheus": PROMETHEUS,
    "export KVROUTE_DASHBOARDS": GRAFANA,
    "grafana": GRAFANA,
    ".venv/bin/python -m": "checks an example: test_contributing_steps.py runs it",
    "python -m tests.support.traces": "makes a trace of 10 MB: test_traces.py makes it",
}

# Checks of the output of a step: text in the step -> regular expression for its output.
SHOWS = {
    f"{CURL}/v1/chat/completions": '"finish_reason":',
    f"{CURL}/v1/route": '"runner_up":',
    "for question in": r"prompt tokens, 0 of them cached\n.* 1\d\d\d of them cached\n$",
    "kvroute doctor --json": r'"grade": *"ok"',
    "kvroute replay": "kvroute",
}


def reason(command: str) -> str | None:
    """Return the longest entry in NOT_HERE with which a command begins, or None."""
    text = " ".join(words(command))
    entries = [entry for entry in NOT_HERE if f"{text} ".startswith((f"{entry} ", f"{entry}="))]
    return max(entries, key=len, default=None)


def runnable(document: Path) -> list[Block]:
    """Return the steps of a document that are run."""
    return [step for step in steps(document) if _is_run(document, step)]


def _is_run(document: Path, step: Block) -> bool:
    if step.language == "python":
        return document != CLIENTS  # tests/slow/clients runs these, with vLLM
    return words(step.text)[0] in HERE and reason(step.text) is None


def shell_commands() -> list[str]:
    """Return the shell commands of all documents."""
    return [step.text for path in DOCUMENTS for step in steps(path) if step.language == "sh"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder in which commands run, with the files that the commands use."""
    folder = tmp_path_factory.mktemp("documents")
    rules = "Name the law you rely on. " * 20
    (folder / "rules.txt").write_text(rules)
    (folder / "chat.json").write_text(json.dumps([{"role": "system", "content": rules}]))
    (folder / "mine.json").write_text("{}")  # an empty profile
    (folder / "trace.jsonl").write_text(trace())
    (folder / "requests").mkdir()
    write_log(folder / "requests" / "router.jsonl")
    return folder


def trace(requests: int = 100) -> str:
    """Return a trace of ten conversations, whose prompts grow by a block in each turn."""
    rows = (
        {
            "timestamp": 200 * n,
            "input_length": BLOCK_TOKENS * (n // 10 + 2),
            "output_length": 20,
            "hash_ids": [0, *(1000 * (n % 10) + turn + 1 for turn in range(n // 10 + 1))],
            "session": n % 10,
        }
        for n in range(requests)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture(scope="module")
def environment(folder: Path, simulated_cluster: Cluster) -> dict[str, str]:
    """Return environment variables for the commands.

    With these, `kvroute` and curl send requests to the simulated cluster, and curl fails if its
    request is refused.
    """
    program = folder / "bin" / "kvroute"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in replay | keys) ;; *) set -- "$@" --url {simulated_cluster.url} ;; esac\n'
        f'exec {shlex.join(KVROUTE)} "$@"\n'
    )
    program.chmod(0o755)
    (folder / ".curlrc").write_text("fail-with-body\n")
    path = f"{program.parent}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "CURL_HOME": str(folder),
        "KVROUTE_URL": simulated_cluster.url,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",  # as wide as the output in the documents
    }


def check_steps(document: Path, folder: Path, environment: dict[str, str]) -> None:
    """Run the steps of a document in order.

    Fails if a step fails, or prints something else than the document shows after it.
    """
    for step in runnable(document):
        shown = run(step, folder, environment)
        for text, expected in SHOWS.items():
            if text in step.text and not is_to_fail(step):
                assert re.search(expected, shown), f"{step.text}\n{shown}"
        if step.output:
            assert is_as_shown(step.output, shown), f"{step.text}\n{step.output}\n{shown}"


def is_to_fail(step: Block) -> bool:
    """Return whether the document shows an error as the output of the step."""
    return '"error":' in step.output


def run(step: Block, folder: Path, environment: dict[str, str]) -> str:
    """Run a step and return its output. Fails if the step fails, unless the document says so."""
    shell = ["bash", "-c"] if step.language == "sh" else [sys.executable, "-c"]
    done = subprocess.run(
        [*shell, step.text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    has_failed = done.returncode != 0
    assert has_failed == is_to_fail(step), f"{step.text}\n{done.stdout}{done.stderr}"
    return done.stdout
