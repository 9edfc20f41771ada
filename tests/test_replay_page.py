"""The page of a replay stands alone, and its plots are the numbers of the replay."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.progress import Progress
from typer.testing import CliRunner

from replica.kvindex.fingerprint import Fingerprint
from router.cli import app
from router.replay.compare import Run, compare
from router.replay.page import page
from router.replay.plot import linear, logarithmic, style
from router.replay.policies import POLICIES
from router.replay.report import WARM_UP
from router.replay.simulate import Cluster
from router.replay.trace import BLOCK_TOKENS, Request, ideal_hit_tokens

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta"}  # elements that have no end
NAMES = ["kvroute", "round-robin", "sglang"]

Points = list[tuple[float, float]]
Plot = dict[str, Points]  # by the line's name


def chats(count: int = 400) -> list[Request]:
    """Every seventh request goes on where the one seven before it ended."""
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
def plots(document: str) -> list[Plot]:
    """What a reader takes from the plots: the lines' points, by the labels of the axes."""
    svgs = map(ElementTree.fromstring, re.findall(r"<svg .*?</svg>", document, flags=re.DOTALL))
    drawn = [svg for svg in svgs if svg.find(f"{SVG}polyline") is not None]
    return [read(svg, is_log=number == 0) for number, svg in enumerate(drawn)]


def read(svg: ElementTree.Element, *, is_log: bool) -> Plot:
    ticks: dict[str, list[tuple[float, float]]] = {"end": [], "middle": []}
    for text in svg.iter(f"{SVG}text"):
        if re.fullmatch(r"[\d.e+-]+", text.text or ""):
            place = float(text.attrib["x"]), float(text.attrib["y"]) - 4  # of a text's middle
            anchor = text.attrib["text-anchor"]
            ticks[anchor].append((place[anchor == "end"], float(text.text or "")))
    (left, least), *_, (right, most) = ticks["middle"]
    (bottom, low), *_, (top, high) = ticks["end"]

    def value(across: float, down: float) -> tuple[float, float]:
        share = (across - left) / (right - left)
        x = least * (most / least) ** share if is_log else least + share * (most - least)
        return x, low + (high - low) * (down - bottom) / (top - bottom)

    return {
        line.findtext(f"{SVG}title", ""): [
            value(*map(float, pair.split(","))) for pair in line.attrib["points"].split()
        ]
        for line in svg.iter(f"{SVG}polyline")
    }


def near(points: Points) -> object:
    """Equal, as far as hundredths of a pixel tell."""
    return pytest.approx(np.array(points), rel=2e-3, abs=0.05)


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


def test_the_page_asks_for_nothing_else(document: str) -> None:
    addresses = set(re.findall(r"https?://[^\s\"']+", document))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import", document)


def test_the_table_has_each_policy_with_its_figures(document: str, runs: list[Run]) -> None:
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', document)
    assert [policy for policy, _ in rows] == NAMES
    for (_, cells), run in zip(rows, runs, strict=True):
        assert f"<td>{run.summary.hit_share:.3f}</td>" in cells
        assert f"<td>{run.summary.ttft_p90_s:.2f}</td>" in cells


def test_every_plot_has_units_a_legend_and_one_sentence(document: str) -> None:
    figures = re.findall(r"<figure>(.*?)</figure>", document, flags=re.DOTALL)
    assert len(figures) == 3
    for figure in figures:
        assert len(re.findall(r"<text[^>]*>[^<]*\((?:s|%)\)</text>", figure)) >= 1
        legend = re.findall(r"<li>.*?</svg>(.*?)</li>", figure)
        lines = re.findall(r"<polyline.*?<title>(.*?)</title>", figure)
        assert legend == lines
        assert set(NAMES) <= set(lines)
        assert len(re.findall(r"\.(?=\s|<)", figure.split("<figcaption>")[1])) == 1


def test_the_first_plot_is_the_wait_of_the_requests_that_count(
    plots: list[Plot], requests: list[Request], runs: list[Run]
) -> None:
    for run in runs:
        waits_s = [
            first_s - request.arrival_s
            for request, first_s in zip(requests, run.outcome.first_token_s, strict=True)
        ][len(requests) // WARM_UP :]
        points = [(float(np.percentile(waits_s, n / 2)), n / 2) for n in range(201)]
        assert np.array(plots[0][run.summary.policy]) == near(points)


def test_the_second_plot_is_the_share_of_cached_tokens_over_time(
    plots: list[Plot], requests: list[Request], runs: list[Run]
) -> None:
    def points(hit_tokens: list[int]) -> Points:
        span_s = requests[-1].arrival_s
        windows = {min(29, int(30 * r.arrival_s / span_s)) for r in requests}
        shares = []
        for window in sorted(windows):
            own = [r for r in requests if min(29, int(30 * r.arrival_s / span_s)) == window]
            hits = sum(hit_tokens[r.index] for r in own)
            shares.append(100 * hits / sum(r.input_tokens for r in own))
        return [((w + 0.5) * span_s / 30, s) for w, s in zip(sorted(windows), shares, strict=True)]

    assert np.array(plots[1]["ideal"]) == near(points(ideal_hit_tokens(requests)))
    for run in runs:
        assert np.array(plots[1][run.summary.policy]) == near(points(run.outcome.hit_tokens))


def test_the_third_plot_is_each_replicas_prefill_from_the_busiest(
    plots: list[Plot], runs: list[Run]
) -> None:
    for run in runs:
        first, second, third = sorted(run.outcome.prefill_s, reverse=True)
        stairs = [(0.0, first), (1, first), (1, second), (2, second), (2, third), (3, third)]
        assert np.array(plots[2][run.summary.policy]) == near(stairs)


def test_every_policy_has_a_look_of_its_own_in_light_and_dark(document: str) -> None:
    looks = [style(number) for number in range(len(POLICIES))]
    assert len(set(looks)) == len(looks)
    assert all(f".{name} {{" in document for look in looks for name in look.split())
    light, dark = document.split("prefers-color-scheme: dark")
    assert all(f"--c{n}: #" in light and f"--c{n}: #" in dark for n in range(6))


def test_one_replica_that_never_hits_has_a_page_too() -> None:
    requests = [Request(n, float(n), 100, 5, ()) for n in range(12)]
    with Progress(disable=True) as progress:
        runs = compare(["random"], requests, Cluster(1, 60_000), seed=0, progress=progress)
    assert page("one", requests, runs, {}).count("<polyline") == 4


@pytest.mark.parametrize("high", [0.07, 1.0, 9.99, 100.0, 12_345.0])
def test_a_linear_axis_has_some_round_ticks_within_it(high: float) -> None:
    ticks = linear("seconds", high).ticks
    assert 4 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert 0.7 * high < ticks[-1] <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [
        (0.02, 90.0, (0.02, 100)),
        (1.0, 1.0, (1, 2)),
        (0.9, 1.1, (0.5, 2)),
        (3e-4, 7e3, (2e-4, 1e4)),
        (0.3, 0.7, (0.2, 1)),
    ],
)
def test_a_logarithmic_axis_ends_at_round_numbers_around_its_values(
    low: float, high: float, ends: tuple[float, float]
) -> None:
    axis = logarithmic("seconds", low, high)
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert 2 <= len(axis.ticks) <= 8
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)


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
