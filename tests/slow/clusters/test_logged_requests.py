"""What a real cluster logs can be replayed."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvroute.cli import app
from tests.support.clients import openai_client
from tests.support.json_lines import read_lines
from tests.support.serving import Cluster
from tests.support.waiting import wait_until
from tests.support.workloads import ask, people_table, table_questions, user


def lines(path: Path) -> list[dict[str, Any]]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return read_lines(files)


def test_what_a_cluster_logs_can_be_replayed_under_any_policy(
    node: Cluster, node_log: Path, tmp_path: Path
) -> None:
    already = lines(node_log)
    with openai_client(node) as client:
        tables = [people_table(rows) for rows in (10, 20, 30)]
        answers = [ask(client, user(f"{t}\n{q}")) for t in tables for q in table_questions()]
    wait_until(lambda: len(lines(node_log)) == len(already) + len(answers))
    written = [line for line in lines(node_log) if line not in already]
    assert len({answer.replica for answer in answers}) == 2
    assert sorted((a.replica, a.prompt_tokens, a.cached_tokens) for a in answers) == sorted(
        (line["replica"], line["input_length"], line["cached_tokens"]) for line in written
    )
    (tmp_path / "requests.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in written))
    options = ["--policy", "kvroute,round-robin", "--json"]
    result = CliRunner().invoke(app, ["replay", str(tmp_path), *options])
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == ["measured", "kvroute", "round-robin"]
    assert "its pace, 2 replicas" in " ".join(result.stderr.split())
    assert "NOTE" not in result.stderr
    assert all(row["hit_share"] > 0.5 for row in rows)
