"""What the documents say is true: tables, links and commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.sim_engine.sampling import Chat, Completion
from tests.support.documents import (
    ADDRESS,
    API,
    CLIENTS,
    DOCUMENTS,
    METRICS,
    README,
    ROOT,
    SETTINGS,
    Block,
    anchors,
    blocks,
    links,
    name,
    steps,
    words,
)
from tests.support.metrics_table import metrics_table
from tests.support.serving import KVROUTE, Cluster
from tests.support.settings_table import settings_table

LANGUAGES = {"sh", "python", "text", "yaml", "json", "toml"}
CURL = f"curl {ADDRESS}"

ITS_OWN = "starts a cluster of its own"
GPUS = "needs GPUs and downloads a model"
MINUTES = "measures for minutes"
CLOUD = "needs machines: test_deploy.py checks the files, test_nodes.py runs them"
IMAGES = "needs a container runtime: test_containers.py checks the files"
BALANCER = "needs the nodes' addresses filled in: test_load_balancers.py runs it so"
PROMETHEUS = "test_dashboards.py runs it on a port of its own, where Prometheus is installed"
GRAFANA = "needs Grafana: test_dashboards.py checks the files"

HERE = {"curl", "kvroute"}  # programs whose commands are run, but for those below

# Commands, by their first words, that are not run, and why.
NOT_HERE = {
    "make serve": "tests/support/serving.py starts what it starts, for every test of a cluster",
    "make test": "runs this",
    "make setup GPU=1": GPUS,
    "make serve ARGS=--model Qwen/Qwen3-8B --replicas 4": GPUS,
    "make bench": f"{MINUTES}: test_bench.py runs its parts",
    "make bench-engines": MINUTES,
    "make bench-prefixes": MINUTES,
    "kvroute serve --lora": f"{ITS_OWN}: test_served_adapters.py has one",
    "kvroute serve --api-keys": f"{ITS_OWN}: test_api_keys.py has one",
    "kvroute serve --metrics-token-file": f"{ITS_OWN}: test_inside.py has one",
    "KVROUTE_METRICS_TOKEN_FILE=metrics-token kvroute doctor": f"{ITS_OWN}: test_inside.py has one",
    "kvroute tenants": f"{ITS_OWN}: test_api_keys.py has one",
    "kvroute serve --model Qwen/Qwen3-8B": GPUS,
    "kvroute serve --models": GPUS,
    "kvroute serve --replicas 2 --data-parallel-size": GPUS,
    "kvroute serve --engine-args": GPUS,
    "kvroute serve --engine-arg runner=pooling": f"{ITS_OWN}: test_seeing_and_embedding.py has one",
    "kvroute serve --request-log": f"{ITS_OWN}: test_request_log.py has one",
    "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 kvroute serve": (
        f"{ITS_OWN}: test_telemetry.py has one"
    ),
    "kvroute scale": "would take a replica from other tests: test_rollout.py runs it",
    "kvroute calibrate": f"{MINUTES}: test_calibrate.py runs it",
    "ray up": CLOUD,
    "ray exec": CLOUD,
    "ray down": CLOUD,
    "serve deploy": CLOUD,
    "(umask": "makes a secret in a file that stays",
    "docker compose": IMAGES,
    "docker build": IMAGES,
    "kubectl apply": "needs Kubernetes: test_kubernetes.py checks the files",
    "password=$(openssl": "is for the next command",
    "kubectl create secret": "needs Kubernetes: test_kubernetes.py runs it without one",
    "haproxy": BALANCER,
    "nginx": BALANCER,
    "prometheus": PROMETHEUS,
    "export KVROUTE_DASHBOARDS": GRAFANA,
    "grafana": GRAFANA,
    "python -m tests.support.picture": "needs a Prometheus with data: screenshots.py runs it",
}

# What a step prints, by text in it, where its success alone would say too little.
SHOWS = {
    f"{CURL}/v1/chat/completions": '"finish_reason":',
    f"{CURL}/v1/route": '"runner_up":',
    f"{CURL}/v1/prefixes": '"id":"legal-v3"',
    "for question in": r"prompt tokens, 0 of them cached\n.* 1\d\d\d of them cached\n$",
    "prefix_id": "prompt_tokens=",
    "kvroute doctor --json": r'"grade": *"ok"',
    "kvroute replay": "kvroute",
}


def reason(command: str) -> str | None:
    """Its entry in NOT_HERE: the longest that it begins with."""
    said = " ".join(words(command))
    found = [entry for entry in NOT_HERE if f"{said} ".startswith((f"{entry} ", f"{entry}="))]
    return max(found, key=len, default=None)


def runnable(document: Path) -> list[Block]:
    """Its steps that are run here: in a folder of their own, against the cluster of the tests."""
    return [step for step in steps(document) if _is_run(document, step)]


def _is_run(document: Path, step: Block) -> bool:
    if step.language == "python":
        return document != CLIENTS  # tests/vllm/test_clients.py runs these, with vLLM
    return words(step.text)[0] in HERE and reason(step.text) is None


def shell_commands() -> list[str]:
    """Of all documents."""
    return [step.text for path in DOCUMENTS for step in steps(path) if step.language == "sh"]


def test_every_setting_is_in_its_page_as_it_is() -> None:
    assert settings_table() in SETTINGS.read_text()


def test_every_metric_is_in_its_page_as_it_is() -> None:
    assert metrics_table() in METRICS.read_text()


def test_every_request_field_is_in_the_api_page() -> None:
    fields = {*Chat.__struct_fields__, *Completion.__struct_fields__}
    assert fields <= set(re.findall(r"`(\w+)`", API.read_text()))


def test_the_built_in_model_is_named_as_it_is() -> None:
    assert f'"model": "{BUILTIN_MODEL}"' in README.read_text()


def test_every_link_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for link in links(document):
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            assert target.exists(), (name(document), link)
            assert not anchor or anchor in anchors(target), (name(document), link)


def test_every_code_block_says_what_it_is() -> None:
    for document in DOCUMENTS:
        assert {block.language for block in blocks(document)} <= LANGUAGES, name(document)
        for block in blocks(document):
            if block.language == "json":
                json.loads(block.text)


def test_the_scrape_configuration_is_the_shipped_one() -> None:
    (shown,) = (block.text for block in blocks(METRICS) if block.language == "yaml")
    shipped = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert yaml.safe_load(shown)["scrape_configs"] == yaml.safe_load(shipped)["scrape_configs"]


def test_what_is_not_run_here_is_in_a_document() -> None:
    assert {reason(command) for command in shell_commands()} - {None} == set(NOT_HERE)


def test_every_other_command_is_run() -> None:
    assert {words(each)[0] for each in shell_commands() if not reason(each)} <= HERE


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {words(command)[1] for command in shell_commands() if command.startswith("make ")}
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_file_of_ours_that_a_command_names_exists() -> None:
    named = {word for command in shell_commands() for word in words(command)}
    files = {word.removeprefix("$PWD/") for word in named if re.search(r"^(\$PWD/)?deploy/", word)}
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_the_options_of_every_command_that_is_not_run_exist() -> None:
    for command in filter(reason, shell_commands()):
        if "kvroute" in (typed := words(command)):
            arguments = typed[typed.index("kvroute") + 1 :]
            assert CliRunner().invoke(app, [*arguments, "--help"]).exit_code == 0, command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands find where they run: the files that they name."""
    folder = tmp_path_factory.mktemp("documents")
    rules = "Name the law you rely on. " * 20
    (folder / "rules.txt").write_text(rules)
    (folder / "chat.json").write_text(json.dumps([{"role": "system", "content": rules}]))
    (folder / "mine.json").write_text("{}")  # a profile with nothing of its own
    (folder / "trace.jsonl").write_text(trace(512))
    (folder / "requests").mkdir()
    (folder / "requests" / "router.jsonl").write_text(trace(128, block_size=128))
    return folder


def trace(block_tokens: int, requests: int = 100, **more: int) -> str:
    """Ten conversations, whose prompts grow by a block a turn."""
    rows = (
        {
            "timestamp": 200 * n,
            "input_length": block_tokens * (n // 10 + 2),
            "output_length": 20,
            "hash_ids": [0, *(1000 * (n % 10) + turn + 1 for turn in range(n // 10 + 1))],
            **more,
        }
        for n in range(requests)
    )
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.fixture(scope="module")
def environment(folder: Path, simulated_cluster: Cluster) -> dict[str, str]:
    """`kvroute` asks the cluster of the tests, and a curl that is refused fails."""
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
    return {**os.environ, "PATH": path, "CURL_HOME": str(folder), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if runnable(path)], ids=name)
def test_every_command_works(
    document: Path, folder: Path, environment: dict[str, str], simulated_cluster: Cluster
) -> None:
    for step in runnable(document):
        shown = run(step, simulated_cluster.url, folder, environment)
        for text, expected in SHOWS.items():
            if text in step.text:
                assert re.search(expected, shown), f"{step.text}\n{shown}"


def run(step: Block, url: str, folder: Path, environment: dict[str, str]) -> str:
    """What the step prints. Fails where it fails."""
    shell = ["bash", "-c"] if step.language == "sh" else [sys.executable, "-c"]
    done = subprocess.run(
        [*shell, step.text.replace(ADDRESS, url)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{step.text}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_what_a_step_is_to_show_is_of_a_step() -> None:
    texts = [step.text for path in DOCUMENTS for step in steps(path)]
    assert all(any(text in step for step in texts) for text in SHOWS)
