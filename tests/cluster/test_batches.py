"""`kvroute batch run` against a running cluster: each line gets exactly one result."""

import json
import os
import random
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.serving import KVROUTE, Cluster
from tests.support.waiting import wait_until

DOCUMENTS, QUESTIONS = 12, 5
TIMEOUT_S = 240.0


def write_lines(path: Path, model: str) -> list[str]:
    """Write questions about documents, shuffled, and return their custom_ids."""
    order = [(number, turn) for number in range(DOCUMENTS) for turn in range(QUESTIONS)]
    random.Random(1).shuffle(order)
    with path.open("w") as file:
        for number, turn in order:
            document = " ".join(map(str, random.Random(number).choices(range(1000), k=300)))
            content = f"{document}\nQuestion {turn}?"
            messages = [{"role": "user", "content": content}]
            body = {"model": model, "messages": messages, "max_tokens": 3, "temperature": 0}
            line = {"custom_id": f"{number}-{turn}", "method": "POST", "body": body}
            file.write(json.dumps(line | {"url": "/v1/chat/completions"}) + "\n")
    return [f"{number}-{turn}" for number, turn in order]


def command(cluster: Cluster, file: Path, output: Path, *options: str) -> list[str]:
    return [*KVROUTE, "batch", "run", f"{file}", "-o", f"{output}", "--url", cluster.url, *options]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def model(cluster: Cluster) -> str:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none").models.list().data[0].id


def test_every_line_has_one_answer_although_the_command_is_killed(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = write_lines(file, model)
    for answered in (10, 30):
        process = subprocess.Popen(command(cluster, file, output, "--max-open", "4"))
        try:
            wait_until(lambda: answers_in(output) >= answered)  # noqa: B023  # used at once
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    finished = subprocess.run(
        command(cluster, file, output), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 0, finished.stderr
    assert f"{len(ids)} of {len(ids)} lines have a result" in finished.stdout
    answers = results(output)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(ids)
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert not Path(f"{output}.errors").exists()
    before = output.read_bytes()
    again = subprocess.run(
        command(cluster, file, output), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert again.returncode == 0, again.stderr
    assert output.read_bytes() == before


def test_lines_about_one_document_are_sent_together(
    cluster: Cluster, model: str, tmp_path: Path
) -> None:
    """All but the first question about a document find it in a cache."""
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(file, model)
    text = file.read_text().replace("Question", "Another question")
    file.write_text(text.replace('"content": "', f'"content": "{os.urandom(8).hex()} '))
    subprocess.run(command(cluster, file, output, "--max-open", "1"), check=True, timeout=TIMEOUT_S)
    order = [answer["custom_id"].split("-")[0] for answer in results(output)]
    changes = sum(left != right for left, right in pairwise(order))
    assert changes == DOCUMENTS - 1


def test_a_bad_line_costs_only_itself(cluster: Cluster, model: str, tmp_path: Path) -> None:
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"model": model, "prompt": "x", "max_tokens": tokens} for tokens in (1, -1, 1)]
    bodies.append({"model": "unknown", "prompt": "x"})
    with file.open("w") as lines:
        for number, body in enumerate(bodies):
            line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
            lines.write(json.dumps(line) + "\n")
    finished = subprocess.run(
        command(cluster, file, output), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 1
    assert "2 failed lines" in finished.stdout
    assert {answer["custom_id"] for answer in results(output)} == {"0", "2"}
    errors = {error["custom_id"]: error["response"] for error in results(Path(f"{output}.errors"))}
    assert {number: error["status_code"] for number, error in errors.items()} == {
        "1": 400,
        "3": 404,
    }
    assert all("message" in error["body"]["error"] for error in errors.values())


def test_a_bad_file_is_refused_with_its_line_numbers(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}\n[]\n")
    finished = subprocess.run(
        command(cluster, file, tmp_path / "out"), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 1
    assert "line 1: " in finished.stderr
    assert "line 2: " in finished.stderr
    assert not (tmp_path / "out").exists()
