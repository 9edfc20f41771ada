"""Tables at 80 columns: with the longest names, nothing is cut and no word is broken."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer

from kvroute.client import fail
from kvroute.command import explain, status_command
from kvroute.command.tables import Column, number, print_lines, print_table, prose, seconds
from kvroute.deployments import plain
from kvroute.doctor.checks import Check
from kvroute.router.observability.recent_requests import KEPT, RecentAnswers
from tests.support.narrow_terminal import LONG, NAMES, SHORT, is_whole, shown


def replica(name: str, **facts: Any) -> dict[str, Any]:
    return {
        "id": name,
        "model": name,
        "node": "2001:db8:85a3:8d3:1319:8a2e:370:7348",
        "blocks": 1_234_567,
        "capacity_blocks": 1_234_567,
        "running": 1234,
        "waiting": 0,
        "degraded": None,
        "tool_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
        **facts,
    }


def cluster(name: str) -> dict[str, Any]:
    queue = {"requests": 3, "oldest_s": 14.0, "all_routers": {"requests": 10, "prefill_s": 11.5}}
    seats = {"is_limited": False, "sessions": 4}
    recent = {
        "window_s": 300.0,
        "requests": 1200,
        "requests_per_s": 4.0,
        "prompt_tokens": 8000,
        "cached_tokens": 6000,
        "ttft_p50_s": 0.0123,
        "ttft_p90_s": 1.25,
        "tpot_p50_s": 0.0312,
        "tpot_p90_s": 0.08,
    }
    return {
        "version": "0.1.0",
        "replicas": [replica(name, degraded="its template digest is another one")],
        **{part: [{"model": name, **facts}] for part, facts in (("queues", queue),)},
        **{part: [{"model": name, **facts}] for part, facts in (("seats", seats),)},
        **{part: [{"model": name, **facts}] for part, facts in (("recent", recent),)},
    }


@pytest.mark.parametrize("name", NAMES)
def test_status(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(status_command, "call", lambda *_: cluster(name))
    text = shown("status", "--url", "http://x")
    assert is_whole(text, name, "1,234,567", "2001:db8:85a3:8d3:1319:8a2e:370:7348", "DEGRADED")
    times = ("12.3 ms (p50)", "1.2 s (p90)", "31.2 ms (p50)", "80 ms (p90)")
    for part in ("75.0% of 8,000", "4.00/s", *times, "kvroute 0.1.0"):
        assert part in text
    assert not {"pid", "incarnation"} & {*text.split()}


@pytest.mark.parametrize("is_stopping", [True, False])
def test_status_says_whether_the_cluster_stops(
    monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    seen = cluster(SHORT) | {"stopping": is_stopping}
    monkeypatch.setattr(status_command, "call", lambda *_: seen)
    text = " ".join(shown("status", "--url", "http://x").split())
    assert ("STOPPING the cluster finishes its running answers" in text) == is_stopping


def test_status_says_when_redis_is_away_and_which_replicas_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = {"model": SHORT, "replicas": 1, "wanted": 2, "missing": {"b": "lost"}}
    away = {"reachable": False, "writable": True, "age_s": 12.0}
    seen = cluster(SHORT) | {"index": away, "fleets": [fleet]}
    monkeypatch.setattr(status_command, "call", lambda *_: seen)
    text = " ".join(shown("status", "--url", "http://x").split())
    assert "REDIS has not answered for 12.0 s; requests are answered meanwhile" in text
    assert "replicas 1 of 2 replicas are ready; lost: b" in text


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(*checks: Check) -> str:
        monkeypatch.setattr("kvroute.doctor.collect.collect_checks", lambda *_, **__: iter(checks))
        return shown("doctor", "--url", "http://x")

    return run


@pytest.mark.parametrize("name", NAMES)
def test_doctor(doctor: Callable[..., str], name: str) -> None:
    text = doctor(Check(f"canary-of-{name}", "wrong", f"no answer of {name} [see]", "look: at it"))
    assert is_whole(text, f"canary-of-{name}", "[see]", "look:")


def test_the_doctor_begins_with_a_summary_and_the_worst(doctor: Callable[..., str]) -> None:
    grades = {"one": "ok", "two": "warning", "three": "ok", "four": "wrong"}
    checks = [Check(name, grade, "found") for name, grade in grades.items()]  # type: ignore[arg-type]
    summary, _, _, *rows = doctor(*checks).splitlines()
    assert summary == "4 checks: 1 wrong, 1 warning, 2 ok"
    assert [row.split()[1] for row in rows] == ["four", "two", "one", "three"]
    assert doctor(checks[0]).startswith("1 check: everything is ok\n")


def receipt(*names: str) -> dict[str, Any]:
    terms = {"waiting": 0.0, "own": 0.002, "copy": 0.0, "rotation": -0.5, "decode": 0.0}
    replicas = [
        {
            "id": name,
            "hit_tokens": 32 - 32 * n,
            "backlog_s": 0.0,
            "prefill_s": 0.002,
            "unanswered": 0,
            "cost_s": 0.002 + 0.019 * n,
            "terms_s": terms | {"copy": 0.019 * n},
        }
        for n, name in enumerate(names)
    ]
    return {
        "prompt_tokens": 37,
        "block_size": 32,
        "reusable_blocks": 1,
        "choice": names[0],
        "reason": "it has 32 of 37 tokens cached",
        "evicted": None,
        "broken": None,
        "replicas": replicas,
    }


@pytest.mark.parametrize("names", [(SHORT, "lavxu2qt"), (LONG[:30], f"{LONG[:30]}2")])
def test_explain(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]) -> None:
    monkeypatch.setattr(explain, "call", lambda *_, **__: {"receipts": [receipt(*names)]})
    text = shown("explain", "Hello", "--url", "http://x")
    assert " ".join(text.split()).startswith(f"Goes to {names[0]}: it has 32 of 37 tokens cached.")
    assert is_whole(text, names[1], "21", "19")
    assert "-500" not in text
    assert not {"0.0", "queued", "waiting", "rotation"} & {*text.split()}


def test_names_that_look_like_markup_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table([Column("name"), prose("text")], [["[bold]x", ":smile: [/red]"]])
    print_lines([("[bold]", ":smile:")])
    text = capsys.readouterr().out
    assert {"[bold]x", ":smile:", "[/red]", "[bold]"} <= {*text.split()}


def test_numbers_are_at_the_right_below_their_heading(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([number("tokens\nsaved"), Column("x")], [["1", "a"], ["1,000", "b"]])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        *("tokens", " saved  x", "     1  a", " 1,000  b")
    ]


def test_a_table_that_is_too_wide_is_wrapped_or_divided_and_stays_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "26")
    columns = [Column("name"), Column("pinned"), number("saved\ntokens")]
    print_table(columns, [["law", "in host memory", "123"]])
    print_table(columns, [["law", "/a/folder/somewhere", "123"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        *("                     saved", "name  pinned        tokens"),
        *("law   in host          123", "      memory"),
        *("name  pinned", "law   /a/folder/somewhere", ""),
        *("       saved", "name  tokens", "law      123"),
    ]


def test_a_table_without_rows_has_its_headings(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("prefix"), Column("version")], [])
    assert capsys.readouterr().out.split() == ["prefix", "version"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0227, "22.7 ms"), (1.25, "1.2 s"), (99.0, "99.0 s"), (1234.0, "1,234 s")],
)
def test_a_time_has_a_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_first_tokens_of_the_last_minutes_are_counted() -> None:
    now = [1000.0]
    recent = RecentAnswers(lambda: now[0])
    assert recent.as_json()["ttft_p50_s"] is None
    now[0] = 1100.0
    for ttft_s in (0.1, 0.2, 0.3):
        recent.add(ttft_s)
    found = recent.as_json()
    assert (found["window_s"], found["requests"], found["requests_per_s"]) == (100.0, 3, 0.03)
    assert (found["ttft_p50_s"], found["ttft_p90_s"]) == (0.2, 0.28)
    now[0] = 1401.0
    assert recent.as_json()["requests"] == 0


def test_with_many_requests_the_window_is_shorter() -> None:
    now = [0.0]
    recent = RecentAnswers(lambda: now[0])
    for _ in range(2 * KEPT):
        now[0] += 0.01
        recent.add(1.0)
    found = recent.as_json()
    assert found["requests"] == KEPT
    assert found["requests_per_s"] == pytest.approx(100, rel=0.01)
    assert json.dumps(found)


def test_a_terminal_gets_errors_in_whole_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    with pytest.raises(typer.Exit):
        fail("--some-option is 'a value'; expected another-value-that-is-long")
    lines = plain(capsys.readouterr().err).splitlines()
    assert lines == ["--some-option is 'a value';", "expected", "another-value-that-is-long"]
