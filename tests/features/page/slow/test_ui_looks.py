"""The live page in a browser, with made-up events: widths, colours, and the keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.features.page.slow.page_server import PageServer, serve
from tests.features.page.slow.page_state import page_state
from tests.support.browser import Page, page
from tests.support.untested import needs

pytestmark = needs("chromium")

LOOKS = Path(__file__).with_name("looks.js").read_text()
WIDTHS = (400, 800, 1280, 1920)
SHOWN = "document.querySelectorAll('.chart .line').length > 0"
MOST_TABS = 80


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with page() as shown:
        yield shown


@pytest.fixture(scope="module")
def fleet() -> Iterator[PageServer]:
    with serve(page_state(replicas=7)) as server:
        yield server


def look(browser: Page, server: PageServer, *, width: int = 1280, is_dark: bool = False) -> Page:
    """The page at this width, with all of it to see."""
    browser.colours("dark" if is_dark else "light")
    browser.open(f"{server.url}/ui", width=width)
    browser.wait_for(SHOWN)
    browser.evaluate(LOOKS.replace("const ", "var "))
    return browser


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_fits_into_the_window_and_all_of_it_can_be_read(
    browser: Page, fleet: PageServer, is_dark: bool
) -> None:
    shown = look(browser, fleet, is_dark=is_dark)
    shown.evaluate("document.querySelector('#decisions summary').click()")
    shown.wait_for("document.querySelector('.receipt table') !== null")
    for width in WIDTHS:
        shown.resize(width)
        shown.evaluate("new Promise(requestAnimationFrame)")
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        assert (width, shown.evaluate("paleTexts()")) == (width, [])
        assert (width, shown.evaluate("paleLines()")) == (width, [])
    assert shown.errors == []


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 7, 24])
def test_no_card_stands_alone_in_a_row(browser: Page, replicas: int) -> None:
    with serve(page_state(replicas)) as server:
        shown = look(browser, server)
        for width in WIDTHS:
            shown.resize(width)
            shown.evaluate("new Promise(requestAnimationFrame)")
            assert (width, shown.evaluate("orphans()")) == (width, [])
            assert (width, shown.evaluate("scrollBoxes()")) == (width, [])


def test_on_a_telephone_problems_come_first_then_replicas(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet, width=WIDTHS[0])
    parts = ("#figures > .bad", ".fleet", "#figures > :not(.bad)", ".history")
    tops = [f"document.querySelector('{part}').getBoundingClientRect().top" for part in parts]
    positions = [shown.evaluate(top) for top in tops]
    assert positions == sorted(positions)
    first = shown.evaluate("document.querySelector('.tile').dataset.state")
    assert first != "ready", "the tiles of replicas with a problem come first"


def test_charts_have_axes_with_units(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet)
    labels = shown.evaluate("axes()")
    assert labels["Prompt tokens from cache"][:3] == ["0%", "50%", "100%"]
    assert labels["Wait for the first token"][2].endswith("ms")
    assert labels["Requests per second"][2].endswith("/s")
    assert len(labels) == 7
    assert all("now" in texts and "\u221230 min" in texts for texts in labels.values())


def test_a_chart_shows_a_replica_when_it_is_chosen(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet)
    shown.evaluate("document.querySelector('#charted').value = 'r0000001'")
    shown.evaluate("document.querySelector('#charted').dispatchEvent(new Event('change'))")
    about = "document.querySelector('#history-about').textContent"
    shown.wait_for(f"{about}.includes('at replica r0000001 that this router served, one of 2')")
    assert fleet.asked[-1] == "/v1/cluster/live?replica=r0000001"


def test_a_value_without_neighbours_is_a_dot_that_can_be_seen(browser: Page) -> None:
    state = page_state(replicas=1, samples=9)
    samples = state["history"]["samples"]
    samples["prompt_tokens"] = [0, 0, 10, 0, 10, 10, 0, 0, 10]
    with serve(state) as server:
        shown = look(browser, server)
        dots = "[...document.querySelector('.chart').querySelectorAll('circle')].map("
        assert shown.evaluate(f"{dots}(dot) => Math.round(dot.getBoundingClientRect().width))") == [
            6,
            6,
        ]


def test_an_answer_that_another_replica_continued_is_not_shown_as_lost(
    browser: Page, fleet: PageServer
) -> None:
    shown = look(browser, fleet)
    rows = "[...document.querySelectorAll('#decisions .outcome')].map((one) => one."
    assert "continued on r0000006" in shown.evaluate(f"{rows}textContent)")
    assert "failed" not in shown.evaluate(f"{rows}dataset.outcome)")
    shown.evaluate("document.querySelector('[data-outcome=continued]').closest('summary').click()")
    shown.wait_for("document.querySelector('.receipt table') !== null")
    told = shown.evaluate("document.querySelector('.receipt').textContent")
    assert "r0000000 was lost during this request, and r0000006 got it. The answer is" in told


def test_causes_without_tokens_are_folded(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet)
    rows = "[...document.querySelectorAll('#causes tbody tr')].filter((row) => !row.hidden).length"
    assert shown.evaluate(rows) == 4
    shown.evaluate("document.querySelector('#zeros').click()")
    assert shown.evaluate(rows) == 13


@pytest.mark.parametrize("width", [400, 1280])
def test_the_keyboard_alone_reaches_everything_and_explains_it(
    browser: Page, fleet: PageServer, width: int
) -> None:
    shown = look(browser, fleet, width=width)
    reached = dict[str, list[str]]()
    for _ in range(MOST_TABS):
        shown.press("Tab")
        focused = shown.evaluate("focused()")
        if focused["name"].startswith("body"):
            break
        assert focused["isSeen"], focused
        assert shown.evaluate("tipsFit()"), focused
        reached[focused["name"]] = shown.evaluate("openTips()")
    assert {"select charted", "button pause", "button zeros"} <= {*reached}
    assert reached["button Queued"][0].startswith("Requests that all routers hold back")
    assert reached["button Sessions with a seat"] == ["Seats."]
    assert reached["button spilled"][0].endswith("When there are many: add replicas.")
    assert sum(name.startswith("summary") for name in reached) >= 1
    assert not reached["select charted"], "a tip closes when the focus goes on"


def test_escape_closes_an_explanation(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet)
    shown.press("Tab")
    assert len(shown.evaluate("openTips()")) == 1
    shown.press("Escape")
    assert shown.evaluate("openTips()") == []


def test_arrow_keys_read_a_charts_values(browser: Page, fleet: PageServer) -> None:
    shown = look(browser, fleet)
    shown.evaluate("document.querySelector('.chart svg').focus()")
    text = "document.querySelector('.chart svg').getAttribute('aria-valuetext')"
    assert shown.evaluate(text).startswith("now: cached ")
    shown.press("ArrowLeft")
    shown.press("Home")
    assert ":00: cached 40%" in shown.evaluate(text)


def test_nothing_is_shown_before_the_key_is_given(browser: Page) -> None:
    with serve(page_state(replicas=2), key="kvr-secret") as server:
        browser.open(f"{server.url}/ui", width=400)
        browser.wait_for("document.querySelector('#login')?.hidden === false")
        assert browser.evaluate("document.querySelector('#live').checkVisibility()") is False
        assert "Replicas" not in browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.activeElement.id") == "key"
        browser.call("Input.insertText", text="kvr-secret")
        browser.press("Enter")
        browser.wait_for(SHOWN)
        assert browser.evaluate("document.querySelector('#login').checkVisibility()") is False
