"""Clusters of two versions, one after the other, behind one load balancer, and their clients."""

import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anthropic
import httpx
from openai import OpenAI

from kvroute.local.embedded_redis import embedded_redis
from kvroute.local.ports import free_port
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.batches import assert_complete, completed, create, is_final, questions
from tests.support.load_balancers import LoadBalancer, haproxy
from tests.support.serving import KVROUTE, Cluster
from tests.support.waiting import wait_until

ROLES = {"chats": (), "stored": (), "operators": ("use", "observe", "manage")}  # by tenant
TOKENS = 40  # of an answer
LONG = 1000  # tokens of a background response
SLOW_S = 400.0  # seconds that several clusters on a small machine may take
PREFIX = "the-rules"
RULES = "Answer in one word, and always be polite. " * 20


@dataclass
class Fleet:
    """Clusters with the same id, Redis, API keys and folder of files."""

    balancer: LoadBalancer
    keys: dict[str, str]  # by tenant
    options: tuple[str, ...]  # of each cluster
    redis_url: str
    files: Path
    answered: Counter[str] = field(default_factory=Counter)  # requests by kind
    replicas: set[str] = field(default_factory=set)  # all that have answered since a `clear`

    def client(self, tenant: str) -> OpenAI:
        """Return a client that does not send failed requests again."""
        url, key = f"{self.balancer.url}/v1", self.keys[tenant]
        return OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)

    def operator(self, url: str = "") -> httpx.Client:
        """Return the operators' client of the load balancer, or of the cluster at a URL."""
        headers = {"authorization": f"Bearer {self.keys['operators']}"}
        return httpx.Client(base_url=url or self.balancer.url, headers=headers, timeout=60)

    def own_replicas(self, cluster: Cluster) -> set[str]:
        """Return the replicas that are processes of this cluster."""
        own = {process.pid for process in cluster.processes()}
        with self.operator(cluster.url) as client:
            listed = client.get("/v1/cluster").raise_for_status().json()["replicas"]
        return {replica["id"] for replica in listed if replica["pid"] in own}

    def add(self, server: str, cluster: Cluster) -> None:
        """Let the load balancer send requests to a cluster."""
        address, port = cluster.url.removeprefix("http://").split(":")
        for command in (f"addr {address} port {port}", "state ready"):
            self.balancer.tell(f"set server nodes/{server} {command}")
        wait_until(lambda: self.balancer.is_up(server))

    def drain(self, server: str) -> None:
        """Send no more requests to a cluster, and wait until it has answered the earlier ones."""
        self.balancer.tell(f"set server nodes/{server} state drain")
        wait_until(lambda: not self.balancer.requests(server))

    def counted(self, tenant: str, cluster: Cluster) -> int:
        """Return how many requests of a tenant the accounts in Redis have."""
        with self.operator(cluster.url) as client:
            accounts = client.get("/v1/cluster/tenants").raise_for_status().json()["data"]
        (account,) = (account for account in accounts if account["tenant"] == tenant)
        requests: dict[str, int] = account["requests"]
        return sum(requests.values()) - requests["failed"]

    def is_served_by(self, cluster: Cluster) -> bool:
        """Wait for more answers of each kind; return whether this cluster gave them all."""
        self.replicas.clear()
        before = self.answered.copy()
        wait_until(lambda: all(self.answered[kind] > before[kind] + 1 for kind in before), SLOW_S)
        return self.replicas <= self.own_replicas(cluster)


@contextmanager
def fleet(folder: Path, *options: str) -> Iterator[Fleet]:
    """Run Redis and the load balancer of a fleet without clusters.

    Args:
        folder: an empty folder.
        options: the options of `kvroute serve` for each cluster.
    """
    path, files = folder / "keys.json", folder / "files"
    keys = {tenant: _new_key(path, tenant, roles) for tenant, roles in ROLES.items()}
    nobody = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with embedded_redis() as url, haproxy(nobody) as balancer:
        shared = ("--redis-url", url, "--api-keys", str(path), "--files-dir", str(files))
        yield Fleet(balancer, keys, (*options, *shared), url, files)


def _new_key(path: Path, tenant: str, roles: Sequence[str]) -> str:
    options = [f"--role={role}" for role in roles]
    command = [*KVROUTE, "keys", "add", "--tenant", tenant, *options, "--file", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def declare(fleet: Fleet) -> None:
    """Declare the named prefix, and wait until all replicas have it."""
    with fleet.operator() as client:
        body = {"id": PREFIX, "messages": [{"role": "system", "content": RULES}], "shared": True}
        client.post("/v1/prefixes", json=body).raise_for_status()
        wait_until(lambda: cold(client) == set())


def cold(client: httpx.Client) -> set[str]:
    """Return the replicas that should have the named prefix but have not reported it.

    A router may be unable to read the reports of another version's replicas.
    """
    prefix: dict[str, Any] = client.get(f"/v1/prefixes/{PREFIX}").raise_for_status().json()
    assert prefix["assigned_to"]
    return {*prefix["assigned_to"]} - {*prefix["warm_on"]}


Ask = Callable[[Fleet], str]  # sends a request and returns the answer's text


@contextmanager
def load(fleet: Fleet, *, is_vllm: bool) -> Iterator[None]:
    """Send requests of several clients again and again until the context ends.

    Each client must get the same answer as at its first request, and no error.
    """
    over = threading.Event()

    def keep_asking(kind: str, ask: Ask) -> set[str]:
        texts = set()
        while not over.is_set():
            texts.add(ask(fleet))
            fleet.answered[kind] += 1
        return texts

    with ExitStack() as open_, ThreadPoolExecutor(16) as pool:
        chats = open_.enter_context(fleet.client("chats"))
        headers = {"authorization": f"Bearer {fleet.keys['chats']}"}
        raw = httpx.Client(base_url=fleet.balancer.url, headers=headers, timeout=120)
        asks: list[tuple[str, Ask]] = [
            *(("stream", partial(_stream, number, chats)) for number in range(2 if is_vllm else 4)),
            *(("named", partial(_named, number, chats)) for number in range(2)),
            ("raw", partial(_completion, open_.enter_context(raw))),
        ]
        if is_vllm:
            claude = anthropic.Anthropic(
                base_url=fleet.balancer.url, auth_token=fleet.keys["chats"], max_retries=0
            )
            stored = open_.enter_context(fleet.client("stored"))
            asks += [
                ("message", partial(_message, open_.enter_context(claude))),
                ("response", partial(_two_turns, stored)),
            ]
        clients = [pool.submit(keep_asking, *ask) for ask in asks]
        kinds = {kind for kind, _ in asks}
        try:
            wait_until(lambda: any(map(Future.done, clients)) or fleet.answered.keys() == kinds)
            assert not any(map(Future.done, clients)), "a client has failed; its error follows"
            yield
        finally:
            over.set()
            texts = [client.result() for client in clients]
    assert all(len(each) == 1 for each in texts), texts


def _stream(number: int, client: OpenAI, fleet: Fleet) -> str:
    """Read a stream to its end, which is the limit of its length."""
    opened = client.chat.completions.create(
        model=BUILTIN_MODEL,
        messages=[{"role": "user", "content": f"Tale {number}? " + "word " * 100}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    fleet.replicas.add(opened.response.headers["x-kvroute-replica"])
    choices = [choice for event in opened for choice in event.choices]
    assert choices[-1].finish_reason == "length"
    return "".join(choice.delta.content or "" for choice in choices)


def _named(number: int, client: OpenAI, fleet: Fleet) -> str:
    """Ask a question after the named prefix, which every replica must have cached."""
    answer = client.chat.completions.create(
        model=BUILTIN_MODEL,
        messages=[{"role": "user", "content": f"Question {number}?"}],
        max_tokens=4,
        temperature=0,
        extra_body={"prefix_id": PREFIX},
    )
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens
    return answer.choices[0].message.content or ""


def _completion(client: httpx.Client, fleet: Fleet) -> str:
    body = {"prompt": [*range(100, 400)], "max_tokens": 3, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    fleet.replicas.add(answer.headers["x-kvroute-replica"])
    return str(answer.json()["choices"][0]["text"])


def _message(client: anthropic.Anthropic, fleet: Fleet) -> str:
    answer = client.messages.create(
        model=BUILTIN_MODEL,
        max_tokens=4,
        messages=[{"role": "user", "content": "A word, please."}],
        extra_body={"temperature": 0},
    )
    return "".join(getattr(block, "text", "") for block in answer.content)


def _two_turns(client: OpenAI, fleet: Fleet) -> str:
    """Continue a stored response, which another cluster may have stored."""
    first = client.responses.create(
        model=BUILTIN_MODEL, input="A word?", temperature=0, max_output_tokens=TOKENS
    )
    second = client.responses.create(
        model=BUILTIN_MODEL,
        input="Another?",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=TOKENS,
    )
    return second.output_text


class Work(Protocol):
    """Something that one cluster has begun and another one ends."""

    def is_running(self, fleet: Fleet) -> bool:
        """Return whether it has not ended."""
        ...

    def check(self, fleet: Fleet) -> None:
        """Assert that the cluster behind the load balancer knows it."""
        ...

    def end(self, fleet: Fleet) -> None:
        """Wait until it has ended, and assert that nothing of it is lost."""
        ...


def begin(fleet: Fleet, *, is_vllm: bool) -> list[Work]:
    """Begin work before a switch to another cluster."""
    batch = BegunBatch(fleet, is_vllm=is_vllm)
    if is_vllm:
        return [batch, Stored(fleet), *(Background(fleet, number) for number in range(2))]
    return [batch]


class BegunBatch:
    """A batch, each line of which must have one result."""

    def __init__(self, fleet: Fleet, *, is_vllm: bool) -> None:
        self._lines = 200 if is_vllm else 1500
        with fleet.client("stored") as client:
            self._id = create(client, questions(BUILTIN_MODEL, self._lines)).id

    def has_begun(self, fleet: Fleet) -> bool:
        with fleet.client("stored") as client:
            return completed(client, self._id) > 0

    def is_running(self, fleet: Fleet) -> bool:
        with fleet.client("stored") as client:
            return not is_final(client, self._id)

    def check(self, fleet: Fleet) -> None:
        with fleet.client("stored") as client:
            assert completed(client, self._id) >= 0

    def end(self, fleet: Fleet) -> None:
        wait_until(lambda: not self.is_running(fleet), within_s=SLOW_S)
        with fleet.client("stored") as client:
            assert_complete(client, self._id, self._lines)


class Background:
    """A response that runs in the background."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        question: dict[str, Any] = {
            "model": BUILTIN_MODEL,
            "input": f"Tell me story number {number}.",
            "temperature": 0,
            "max_output_tokens": LONG,
            "extra_body": {"ignore_eos": True},
        }
        with fleet.client("stored") as client:
            self._id = client.responses.create(**question, background=True).id

    def is_running(self, fleet: Fleet) -> bool:
        with fleet.client("stored") as client:
            return client.responses.retrieve(self._id).status in ("queued", "in_progress")

    def check(self, fleet: Fleet) -> None:
        with fleet.client("stored") as client:
            assert client.responses.retrieve(self._id).status not in ("failed", "cancelled")

    def end(self, fleet: Fleet) -> None:
        wait_until(lambda: not self.is_running(fleet), within_s=SLOW_S)
        with fleet.client("stored") as client:
            ended = client.responses.retrieve(self._id)
        # Its limit of tokens has ended it. The old version takes that for a whole response.
        assert ended.status in ("incomplete", "completed"), ended.error
        assert ended.usage
        assert ended.usage.output_tokens == LONG


class Stored:
    """A stored response, and a conversation with a response."""

    def __init__(self, fleet: Fleet) -> None:
        with fleet.client("stored") as client:
            item = {"type": "message", "role": "user", "content": "Call me Ada."}
            self._conversation = client.conversations.create(items=[item]).id  # type: ignore[list-item]
            self._response = self._respond(client, conversation=self._conversation)
            self._text = client.responses.retrieve(self._response).output_text
            self._items = self._listed(client)
        assert len(self._items) == 3

    def is_running(self, fleet: Fleet) -> bool:
        return False

    def check(self, fleet: Fleet) -> None:
        with fleet.client("stored") as client:
            assert client.responses.retrieve(self._response).output_text == self._text
            assert self._listed(client) == self._items
            self._respond(client, previous_response_id=self._response)
            self._respond(client, conversation=self._conversation)
            self._items = self._listed(client)

    def end(self, fleet: Fleet) -> None:
        self.check(fleet)

    @staticmethod
    def _respond(client: OpenAI, **after: Any) -> str:
        """Return the id of a new response."""
        response = client.responses.create(
            model=BUILTIN_MODEL, input="Hello?", temperature=0, max_output_tokens=8, **after
        )
        assert response.output_text
        return str(response.id)

    def _listed(self, client: OpenAI) -> list[str | None]:
        """Return the ids of the conversation's items, the oldest first."""
        listed = client.conversations.items.list(self._conversation, order="asc", limit=100)
        return [item.id for item in listed]
