"""The page of a replay is self-contained, and its plots show the replay's figures."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.cli import app
from kvroute.replay.compare import Run, compare
from kvroute.replay.page import page, plots
from kvroute.replay.plot import Line, Plot, svg
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.report import WARM_UP
from kvroute.replay.simulate import Cluster
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request, ideal_hit_tokens

VOID = {"meta"}  # elements that have no end
SVGS = re.compile(r"<svg .*?</svg>", re.DOTALL)
NAMES = ["kvroute", "round-robin", "sglang"]


def chats(count: int = 400) -> list[Request]:
    """Return requests in which each continues the prompt of the request seven before it."""
    requests = []
    for index in range(count):
        chain = tuple(Fingerprint(1 + 7 * n + index % 7) for n in range(1 + index // 40))
        tokens = len(chain) * BLOCK_TOKENS + 9
        requests.append(Request(index, 0.05 * index, tokens, 20, chain))
    return requests


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return chats()


@pytest.fixture(scope="module")
def runs(requests: list[Request]) -> list[Run]:
    with Progress(disable=True) as progress:
        return compare(NAMES, requests, Cluster(3, 60_000), seed=0, progress=progress)


@pytest.fixture(scope="module")
def document(requests: list[Request], runs: list[Run]) -> str:
    return page("<chats> & more", requests, runs, {"replicas": 3, "engine": "a<b"})


@pytest.fixture(scope="module")
def shown(requests: list[Request], runs: list[Run]) -> list[Plot]:
    return list(plots(requests, runs))


def points(plot: Plot, name: str) -> object:
    """Return the points of the line with that name."""
    (line,) = [line for line in plot.lines if line.name == name]
    return np.array(line.points)


class Nesting(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_element_is_closed_and_every_text_is_text(document: str) -> None:
    parser = Nesting()
    parser.feed(document)
    parser.close()
    assert parser.open == []
    assert "<chats> & more" in parser.text
    assert "a<b" in parser.text


def test_the_page_loads_no_other_resource(document: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"']+", document))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names
    assert not re.search(r"<script|<link|<img|src=|href=\"[^#]|url\([^#]|@import", document)


def test_the_table_has_each_policy_with_its_figures(document: str, runs: list[Run]) -> None:
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', document)
    assert [policy for policy, _ in rows] == NAMES + NAMES
    for (_, cells), (_, more), run in zip(rows[:3], rows[3:], runs, strict=True):
        assert f"<td>{run.summary.hit_share:.3f}</td>" in cells
        assert f"<td>{run.summary.ttft_p90_s:.2f}</td>" in cells
        assert f"<td>{run.summary.ttft_p90_under_4k_s:.2f}</td>" in more
        assert more.endswith("<td>-</td>")  # no prompt is longer than 48k tokens


def test_every_plot_has_units_a_legend_and_a_caption(document: str, shown: list[Plot]) -> None:
    figures = re.findall(r"<figure>(.*?)</figure>", document, flags=re.DOTALL)
    for figure, plot in zip(figures, shown, strict=True):
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
        assert {plot.x_title, plot.y_title, *(line.name for line in plot.lines)} <= set(texts)
        assert {line.name for line in plot.lines} >= set(NAMES)
        assert re.search(r"\((?:s|%)\)", plot.y_title)
        assert len(re.findall(r"\.(?=\s|<)", figure.split("<figcaption>")[1])) >= 1


def test_the_first_plot_is_the_wait_of_the_requests_that_count(
    shown: list[Plot], requests: list[Request], runs: list[Run]
) -> None:
    for run in runs:
        waits_s = [
            first_s - request.arrival_s
            for request, first_s in zip(requests, run.outcome.first_token_s, strict=True)
        ][len(requests) // WARM_UP :]
        quantiles = [(float(np.percentile(waits_s, n / 2)), n / 2) for n in range(201)]
        assert points(shown[0], run.summary.policy) == pytest.approx(np.array(quantiles))


def test_the_second_plot_is_the_share_of_cached_tokens_over_time(
    shown: list[Plot], requests: list[Request], runs: list[Run]
) -> None:
    def expected(hit_tokens: list[int]) -> object:
        span_s = requests[-1].arrival_s
        windows = {min(29, int(30 * r.arrival_s / span_s)) for r in requests}
        shares = []
        for window in sorted(windows):
            own = [r for r in requests if min(29, int(30 * r.arrival_s / span_s)) == window]
            hits = sum(hit_tokens[r.index] for r in own)
            shares.append(100 * hits / sum(r.input_tokens for r in own))
        middles_s = [(window + 0.5) * span_s / 30 for window in sorted(windows)]
        return pytest.approx(np.array([*zip(middles_s, shares, strict=True)]))

    assert points(shown[1], "ideal") == expected(ideal_hit_tokens(requests))
    for run in runs:
        assert points(shown[1], run.summary.policy) == expected(run.outcome.hit_tokens)


def test_the_third_plot_is_each_replicas_prefill_from_the_busiest(
    shown: list[Plot], runs: list[Run]
) -> None:
    for run in runs:
        first, second, third = sorted(run.outcome.prefill_s, reverse=True)
        stairs = [(0.0, first), (1, first), (1, second), (2, second), (2, third), (3, third)]
        assert points(shown[2], run.summary.policy) == pytest.approx(np.array(stairs))


def test_every_policy_has_its_own_line_style(document: str) -> None:
    lines = [Line(name, [(0.0, 1.0), (1.0, 2.0)]) for name in POLICIES]
    drawn = svg(Plot("all", "x (s)", "y (s)", lines, ""))
    looks = re.findall(r'style="fill: none; ([^"]*stroke: var\(--c\d\)[^"]*)"', drawn)
    assert len(set(looks)) == len(POLICIES)


def test_every_colour_of_a_plot_is_one_for_light_and_one_for_dark(document: str) -> None:
    used = set(re.findall(r"(?:stroke|fill): ([^;\"]+)", "".join(SVGS.findall(document))))
    light, dark = document.split("prefers-color-scheme: dark")
    assert len(used) > len(NAMES)
    for colour in used - {"none"}:
        name = colour.removeprefix("var(").removesuffix(")")
        assert f"{name}: #" in light
        assert f"{name}: #" in dark


def test_one_replica_that_never_hits_has_a_page_too() -> None:
    requests = [Request(n, float(n), 100, 5, ()) for n in range(12)]
    with Progress(disable=True) as progress:
        runs = compare(["random"], requests, Cluster(1, 60_000), seed=0, progress=progress)
    assert len(SVGS.findall(page("one", requests, runs, {}))) == 3


def test_the_command_writes_the_page_besides_its_output(tmp_path: Path) -> None:
    trace, path = tmp_path / "day.jsonl", tmp_path / "day.html"
    rows = (
        {"timestamp": 10 * r.index, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
        for r in chats(60)
    )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--policy", "kvroute,dynamo", "--replicas", "2", "--json", "--html", str(path)]
    result = CliRunner().invoke(app, ["replay", str(trace), *options])
    assert [row["policy"] for row in json.loads(result.stdout)] == ["kvroute", "dynamo"]
    written = path.read_text()
    assert "day.jsonl on 2 replicas at 80% of saturation" in written
    assert "dynamo" in written
    assert "<dt>engine</dt><dd>h200-8b</dd>" in written


@pytest.mark.parametrize("place", ["nowhere/page.html", "."])
def test_a_page_that_could_not_be_written_is_refused_before_the_replay(place: str) -> None:
    result = CliRunner().invoke(app, ["replay", "day.jsonl", "--html", place])
    assert result.exit_code == 2
    assert "folder" in result.stderr


def test_without_matplotlib_a_page_is_refused_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kvroute.replay.page", "kvroute.replay.plot"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["replay", "day.jsonl", "--html", str(tmp_path / "a.html")])
    assert result.exit_code == 2
    assert "matplotlib" in result.stderr
