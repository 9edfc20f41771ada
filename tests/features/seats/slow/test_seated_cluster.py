"""Sessions that wait for a seat: what their clients see, and what operators do."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from kvroute.router.endpoints.signs_of_life import COMMENT
from tests.support.scraping import total
from tests.support.serving import KVROUTE, Cluster, doctor, findings, start_cluster
from tests.support.waiting import wait_until

CROWD, WAVES, TURNS = 16, 2, 6  # sessions at a time, how often, and the turns of each
SESSION, DEADLINE = "x-session-id", "x-kvroute-deadline-s"
KEEP_ALIVE_S, WAIT_S = 5, 30  # a busy machine may need most of WAIT_S to run the doctor
WORDS = "A story of many words that fills some blocks of the cache. " * 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two routers whose replica serves one session at a time."""
    options = ("--engine", "simulated", "--max-sessions", "1", "--routers", "2")
    times = ("--keep-alive-s", f"{KEEP_ALIVE_S}", "--simulated-decode-ms", "1")
    with start_cluster(*options, *times) as cluster:
        # A router does not know the seats that others gave before it heard them.
        wait_until(lambda: all(known_routers(cluster) == 2 for _ in range(8)))
        yield cluster


def known_routers(cluster: Cluster) -> int:
    """Return how many routers the answering router knows, with itself."""
    with httpx.stream("GET", f"{cluster.url}/v1/cluster/live", timeout=30) as events:
        data = next(line for line in events.iter_lines() if line.startswith("data: "))
        return int(json.loads(data.removeprefix("data: "))["changed"]["router"]["routers"])


@pytest.fixture
def holder(cluster: Cluster) -> Iterator[str]:
    """A session with the only seat."""
    for number in (1, 2):
        httpx.post(url(cluster), json=body("holder", number), headers={SESSION: "holder"})
    wait_until(lambda: seats(cluster)["seats"] == 1)
    yield "holder"
    end(cluster, "holder")


def url(cluster: Cluster) -> str:
    return f"{cluster.url}/v1/chat/completions"


def body(session: str, number: int, words: str = WORDS, **more: Any) -> dict[str, Any]:
    """The session's turn with that number, from 1."""
    messages = [{"role": "user", "content": f"{session} {words}"}]
    for each in range(2, number + 1):
        messages.append({"role": "assistant", "content": "Then?"})
        messages.append({"role": "user", "content": f"{each} {words}"})
    return {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 2, **more}


def end(cluster: Cluster, session: str) -> None:
    httpx.delete(f"{cluster.url}/v1/sessions/{session}", timeout=10).raise_for_status()


def seats(cluster: Cluster) -> dict[str, Any]:
    (found,) = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["seats"]
    return dict(found)


def client(cluster: Cluster, session: str, **headers: str) -> openai.OpenAI:
    headers = {SESSION: session} | headers
    return openai.OpenAI(api_key="none", base_url=f"{cluster.url}/v1", default_headers=headers)


def begin(cluster: Cluster, session: str) -> None:
    """Send the session's first turn, which needs no seat."""
    answer = httpx.post(url(cluster), json=body(session, 1), headers={SESSION: session})
    assert (answer.status_code, answer.headers["x-kvroute-queued-for"]) == (200, "none")


def streamed(cluster: Cluster, session: str) -> tuple[float, list[bytes], httpx.Headers]:
    """Return when the head of a second turn came, and the parts of the stream."""
    asked_s, body_ = time.monotonic(), body(session, 2, stream=True)
    headers = {SESSION: session}
    with httpx.stream("POST", url(cluster), json=body_, headers=headers, timeout=120) as answer:
        waited_s = time.monotonic() - asked_s
        return waited_s, [*answer.iter_raw()], answer.headers


def chunks(cluster: Cluster, session: str, **headers: str) -> int:
    """Return how many chunks the official client gets of a second turn."""
    found = client(cluster, session, **headers).chat.completions.create(
        **body(session, 2, stream=True)
    )
    return sum(1 for _ in found)


def test_streams_live_through_a_wait_and_all_see_why(cluster: Cluster, holder: str) -> None:
    begin(cluster, "raw")
    begin(cluster, "late")
    begin(cluster, "official")
    with ThreadPoolExecutor(3) as pool:
        raw = pool.submit(streamed, cluster, "raw")
        wait_until(lambda: seats(cluster)["all_routers"]["waiting"] == 1)
        late = pool.submit(chunks, cluster, "late", **{DEADLINE: f"{WAIT_S}"})
        official = pool.submit(chunks, cluster, "official")
        wait_until(lambda: seats(cluster)["all_routers"]["waiting"] == 3)
        told = seats(cluster)
        assert (told["is_limited"], told["most"], told["seats"]) == (True, 1, 1)
        assert total(cluster, "router")["kvroute_sessions_waiting"] == 3
        (check,) = [
            finding for finding in findings(doctor(cluster, "--json")) if finding.name == "seats"
        ]
        assert check.grade == "warning"
        assert "since --max-sessions is 1; 3 requests waiting for a seat" in check.finding
        assert "--max-sessions is 1" in status(cluster)
        with pytest.raises(openai.APIError, match="its deadline is 30 s"):
            late.result()
        end(cluster, holder)
        waited_s, parts, headers = raw.result()
        end(cluster, "raw")
        assert official.result() > 0
    assert waited_s > KEEP_ALIVE_S - 1
    assert parts[0] == COMMENT
    assert b"data: [DONE]" in parts[-1]
    assert "x-kvroute-replica" not in headers
    end(cluster, "official")
    assert seats(cluster)["all_routers"]["waiting"] == 0


def status(cluster: Cluster) -> str:
    command = [*KVROUTE, "status", "--url", cluster.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(shown.split())  # lines end at any word


def test_a_whole_answer_says_how_long_it_waited(cluster: Cluster, holder: str) -> None:
    begin(cluster, "whole")
    headers = {SESSION: "whole", "x-kvroute-receipt": "1"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post, url(cluster), json=body("whole", 2), headers=headers, timeout=60
        )
        wait_until(lambda: seats(cluster)["all_routers"]["waiting"] == 1)
        end(cluster, holder)
        answer = asked.result()
    assert answer.headers["x-kvroute-queued-for"] == "seat"
    (receipt,) = answer.json()["kvroute_receipts"]
    assert receipt["seat_s"] > 0
    end(cluster, "whole")


def test_who_is_refused_comes_again_and_succeeds(cluster: Cluster, holder: str) -> None:
    begin(cluster, "hurried")
    headers = {SESSION: "hurried", DEADLINE: "0.3"}
    refused = httpx.post(url(cluster), json=body("hurried", 2), headers=headers, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "no_seat")
    assert int(refused.headers["retry-after"]) >= 1
    statuses = list[int]()
    with (
        openai.DefaultHttpxClient(
            event_hooks={"response": [lambda response: statuses.append(response.status_code)]}
        ) as watched,
        ThreadPoolExecutor(1) as pool,
    ):
        again = client(cluster, "hurried", **{DEADLINE: "0.3"}).with_options(
            http_client=watched, max_retries=10
        )
        asked = pool.submit(lambda: again.chat.completions.create(**body("hurried", 2)))
        wait_until(lambda: statuses)
        end(cluster, holder)
        assert asked.result().choices
    assert (statuses[0], statuses[-1]) == (429, 200)
    end(cluster, "hurried")


def test_seats_are_needed_by_themselves_when_contexts_do_not_fit_and_all_complete() -> None:
    """Sessions of 600 to 3,600 tokens share a cache of 16,384. Without seats, each turn computes
    its whole context again."""
    options = ("--engine", "simulated", "--simulated-blocks", "256", "--max-wait-s", "290")
    speed = ("--simulated-prefill-tokens-per-s", "3000", "--simulated-decode-ms", "1")
    with (
        start_cluster(*options, *speed) as cluster,
        ThreadPoolExecutor(CROWD) as pool,
    ):
        was_limited = Event()

        def live(session: str) -> list[str]:
            """Send the session's turns, and return the refusals."""
            refusals = []
            for number in range(1, TURNS + 1):
                asked, headers = body(session, number, words=4 * WORDS), {SESSION: session}
                answer = httpx.post(url(cluster), json=asked, headers=headers, timeout=300)
                if answer.status_code != 200:
                    refusals.append(f"{answer.status_code} {answer.text}")
                if seats(cluster)["is_limited"]:
                    was_limited.set()
            end(cluster, session)
            return refusals

        names = [f"{wave}-{one}" for wave in range(WAVES) for one in range(CROWD)]
        assert not [refusal for refusals in pool.map(live, names) for refusal in refusals]
        assert was_limited.is_set()
        assert seats(cluster)["seats"] == 0
