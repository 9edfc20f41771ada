"""The live page in a browser, before a real cluster."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import requests
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.browser import Page, page
from tests.support.repository import ROOT
from tests.support.serving import Cluster
from tests.support.untested import obstacle
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import ask, people_table, user

AT_ONCE = 8
UI = ROOT / "kvroute" / "features" / "page" / "ui"


@pytest.fixture(scope="module")
def shown(simulated_cluster: Cluster) -> Iterator[Page]:
    """The page at its narrowest, with every replica on it."""
    if reason := obstacle("chromium"):
        pytest.skip(reason)
    with page() as page_:
        page_.open(f"{simulated_cluster.url}/ui", width=400)
        page_.wait_for("document.querySelectorAll('.tile[data-state=ready]').length === 4")
        yield page_


def ask_until(
    page: Page,
    client: OpenAI,
    is_true: str,
    text: str,
    before: Callable[[], list[dict[str, str]]] = list,
) -> None:
    """The page shows what one of two routers does, the one that has it to carry: so the other is
    asked, unless several ask at once."""
    for _ in range(10):
        with ThreadPoolExecutor(AT_ONCE) as clients:
            list(clients.map(lambda _: ask(client, before() + user(text)), range(AT_ONCE)))
        page.evaluate("new Promise((done) => setTimeout(done, 1))")
        if page.evaluate(is_true):
            return
    page.wait_for(is_true)


def tiles(page: Page) -> list[str]:
    """The ids that they show."""
    names = "[...document.querySelectorAll('.tile h3')].map((name) => name.textContent)"
    return list(page.evaluate(names))


def replicas(cluster: Cluster) -> list[str]:
    """The ids of those in the index."""
    listed = requests.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [replica["id"] for replica in listed]


def test_every_replica_has_a_tile_and_the_router_says_that_it_is_one_of_two(
    shown: Page, simulated_cluster: Cluster
) -> None:
    # One may just have been replaced.
    wait_until(lambda: tiles(shown) == sorted(replicas(simulated_cluster)))
    shown.wait_for("document.querySelector('#router').textContent.includes('one of 2')")
    assert BUILTIN_MODEL in shown.evaluate("document.title")
    assert shown.evaluate("document.querySelector('#connection').textContent") == "live"


def test_a_request_appears_as_a_decision_with_its_receipt(shown: Page, client: OpenAI) -> None:
    ask_until(shown, client, "document.querySelector('#decisions details') !== null", "Good day")
    shown.evaluate("document.querySelector('#decisions summary').click()")
    shown.wait_for("document.querySelectorAll('.receipt tr:not(.terms)').length === 1 + 4")
    assert "Why: " in shown.evaluate("document.querySelector('.receipt .reason').textContent")
    assert "Resume" in shown.evaluate("document.querySelector('#pause').textContent")
    shown.evaluate("document.querySelector('#pause').click()")
    shown.wait_for("document.querySelector('#pause').textContent === 'Pause'")


def test_a_chat_that_changes_in_front_is_told_with_its_place(shown: Page, client: OpenAI) -> None:
    ids = count(100)

    def system() -> list[dict[str, str]]:
        return [{"role": "system", "content": f"Request {next(ids)}. {people_table()}"}]

    told = "document.querySelector('#figures').textContent"
    question = "Who is the oldest person in that table?"
    change = f"{told}.includes('in the system message')"
    ask_until(shown, client, change, question, before=system)
    shown.evaluate("document.querySelector('#decisions summary').click()")
    shown.wait_for("document.querySelector('.receipt dl') !== null")
    facts = str(shown.evaluate("document.querySelector('.receipt dl').textContent"))
    assert re.search(
        r"the system message \(number 0\): \d tokens? became \d, and [\d,]+ tokens", facts
    )
    shown.evaluate("document.querySelector('#pause').click()")
    assert shown.errors == []


def test_it_is_no_wider_than_a_small_screen_even_with_a_receipt_open(
    shown: Page, client: OpenAI
) -> None:
    ask_until(shown, client, "document.querySelector('#decisions details') !== null", "Good day")
    shown.evaluate("document.querySelector('#decisions summary').click()")
    shown.wait_for("document.querySelector('.receipt table') !== null")
    assert shown.evaluate("document.documentElement.scrollWidth") <= 400
    assert shown.errors == []


def test_its_own_addresses_are_all_it_asks_for(simulated_cluster: Cluster) -> None:
    answer = requests.get(f"{simulated_cluster.url}/ui", timeout=10)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none';")
    for name in re.findall(r'(?:src|href)="(ui/.*?)"', answer.text):
        file = requests.get(f"{simulated_cluster.url}/{name}", timeout=10)
        assert (file.status_code, file.content) == (200, (UI.parent / name).read_bytes())
    text = "".join(file.read_text() for file in UI.iterdir())
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.mark.parametrize("name", ["nothing.js", "..%2fparts.py", "%2e%2e%2fparts.py"])
def test_a_file_that_is_not_the_pages_is_not_found(simulated_cluster: Cluster, name: str) -> None:
    assert requests.get(f"{simulated_cluster.url}/ui/{name}", timeout=10).status_code == 404


def test_a_page_that_hears_nothing_says_so_and_goes_on_by_itself(
    shown: Page, simulated_cluster: Cluster
) -> None:
    state = "document.querySelector('#connection').dataset.state"
    routers = simulated_cluster.routers()
    assert len(routers) == 2
    for router in routers:
        router.suspend()
    try:
        shown.wait_for(f"{state} === 'stale'")
    finally:
        for router in routers:
            router.resume()
        wait_for_fleet(simulated_cluster)
    shown.wait_for(f"{state} === 'live'")
