"""A real cluster with real vLLM engines and the built-in model."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from dashboards.replica import REPLICA
from kvroute.features import ALL_CODES
from kvroute.local.processes import is_alive
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.bodies import (
    ASK,
    CHATS,
    COMPLETIONS,
    CONTINUED,
    HISTORY,
    MANY_OUTPUTS,
    MESSAGES,
    OTHERS,
    PARAMETERS,
    RESPONSES,
    TOOL,
    Body,
    comparable,
)
from tests.support.clients import async_openai_client
from tests.support.collector import Collector, Span, collecting
from tests.support.event_streams import Joined
from tests.support.hits import wait_for_routers
from tests.support.serving import COMMAND, Cluster, doctor, start_cluster
from tests.support.waiting import until, wait_until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import (
    BLOCK,
    ask,
    interleaved_chats,
    people_table,
    table_questions,
    user,
)

TASKS = {
    "law": "You are a careful lawyer. Answer in one sentence and name the law. " * 40,
    "法律": "你是一名细心的律师。请用一句话回答，并说出法律的名称。" * 15,  # noqa: RUF001
}
# Answers are compared: in float32 they are equal. A token takes twice the memory then.
EXACT = ("--dtype", "float32", "--kv-cache-memory-mb", "1024")
# Seconds in which the cluster has to stop. With its low priority, it takes long beside other tests.
STOP_S = 180.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Cluster]:
    tasks = [{"task_id": name, "prompt": text} for name, text in TASKS.items()]
    env = {"MULTI_TASK_PROMPT_STR": json.dumps(tasks), **collector.env}
    # Its engines take all cores that they get: the tests beside these come first.
    command = ("nice", "-n", "10", *COMMAND)
    options = ("--max-model-len", "4096", *EXACT)
    with start_cluster(*options, env=env, command=command, stop_s=STOP_S) as cluster:
        yield cluster


@pytest.fixture
def vllm(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_a_named_prefix_is_cached_before_its_first_request_on_every_replica(
    cluster: Cluster,
) -> None:
    async with async_openai_client(cluster.url, timeout_s=120) as client:
        for task in TASKS:
            first: dict[str, int] = {}  # replica -> cached tokens of the first request there
            while len(first) < 2:
                context = (name_task(client, task, f"{n}?") for n in range(len(first), 8))
                for replica, cached_tokens in await asyncio.gather(*context):
                    first.setdefault(replica, cached_tokens)
            shown = httpx.get(f"{cluster.url}/v1/prefixes/{task}", timeout=10).json()  # noqa: ASYNC210
            assert shown["tokens"] > 500
            assert set(first.values()) == {shown["full_blocks"] * BLOCK}


def test_a_shared_prefix_is_cached_under_every_salt_and_nothing_behind_it(
    cluster: Cluster, vllm: OpenAI
) -> None:
    """Prefixes of the operator's file are shared."""
    question = "May I keep a lion in the garden of my house? " * 40

    def cached(salt: str) -> int:
        named = {"task_id": "law", "cache_salt": salt}
        usage = vllm.completions.create(
            model=BUILTIN_MODEL, prompt=question, max_tokens=1, extra_body=named
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    shown = httpx.get(f"{cluster.url}/v1/prefixes/law", timeout=10).json()
    shared = shown["full_blocks"] * BLOCK
    assert cached("one") == shared
    # The third comes to one of two replicas that have seen it.
    assert max(cached("one"), cached("one")) > shared + 300
    assert cached("other") == shared
    audited = httpx.get(f"{cluster.url}/v1/cluster/audit", timeout=60).json()["replicas"]
    assert all(set(each["drift"].values()) == {0} for each in audited)


async def name_task(client: AsyncOpenAI, task: str, prompt: str) -> tuple[str, int]:
    """The replica that answered, and what it had cached of the prompt."""
    raw = await client.completions.with_raw_response.create(
        model=BUILTIN_MODEL, prompt=prompt, max_tokens=2, extra_body={"task_id": task}
    )
    usage: Any = raw.parse().usage
    return raw.headers["x-kvroute-replica"], usage.prompt_tokens_details.cached_tokens


def test_the_model_speaks(vllm: OpenAI) -> None:
    answer = ask(vllm, user("What is the capital of France? Answer in one sentence."))
    assert "Paris" in answer.text


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_questions_about_a_long_document_find_it_cached(
    cluster: Cluster, vllm: OpenAI, endpoint: str
) -> None:
    table = f"RequestContext through {endpoint}.\n{people_table()}"
    document_tokens = usage(vllm, endpoint, table)[0]
    prompt = {"messages": user(table)} if endpoint == "chat" else {"prompt": table}
    wait_for_routers(cluster, (document_tokens - 1) // BLOCK * BLOCK, **prompt)
    for question in table_questions():
        _, cached_tokens = usage(vllm, endpoint, f"{table}\n{question}")
        assert cached_tokens >= 0.95 * (document_tokens // BLOCK) * BLOCK


def usage(client: OpenAI, endpoint: str, text: str) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    if endpoint == "chat":
        answer = ask(client, user(text), max_tokens=2)
        return answer.prompt_tokens, answer.cached_tokens
    found = client.completions.create(model=BUILTIN_MODEL, prompt=text, max_tokens=2).usage
    assert found is not None
    assert found.prompt_tokens_details is not None
    return found.prompt_tokens, found.prompt_tokens_details.cached_tokens or 0


async def test_the_engines_own_span_is_part_of_the_requests_trace(
    cluster: Cluster, vllm: OpenAI, collector: Collector
) -> None:
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    prompt = "Say something."
    vllm.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=2, extra_headers=parent)

    def spans_by_name() -> dict[str, Span]:
        return {span.name: span for span in collector.trace("a" * 32)}

    await until(lambda: {"generate", "llm_request"} <= spans_by_name().keys())
    spans = spans_by_name()
    assert spans["llm_request"].parent_id == spans["generate"].span_id
    assert spans["llm_request"].service == spans["generate"].service == "kvroute-replica"
    assert spans["llm_request"].attributes["gen_ai.latency.time_in_model_prefill"] > 0


def test_interleaved_chats_keep_their_caches_and_share_the_work(vllm: OpenAI) -> None:
    outcome = interleaved_chats(
        vllm, chats=6, turns=3, system_words=60, user_words=40, seed=1, max_tokens=8
    )
    assert outcome.hit_share >= 0.95
    assert outcome.imbalance < 2.0


def test_engines_replicas_redis_and_routers_agree_on_what_is_cached(
    cluster: Cluster, vllm: OpenAI
) -> None:
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, vllm, user(f"{i} " * 250), max_tokens=24) for i in range(8)]
        while not all(each.done() for each in asking):
            assert drifts(cluster) <= {0, None}, "on a busy machine leases may end for a moment"
    wait_until(lambda: drifts(cluster) == {0} and len(audited(cluster)) == 2)
    counts = [set(replica["blocks"].values()) for replica in audited(cluster)]
    assert all(len(count) == 1 and min(count) > 50 for count in counts)


def test_the_doctor_finds_the_blocks_of_its_canaries(cluster: Cluster) -> None:
    examined = doctor(cluster, "--json")
    found = {check["name"]: check for check in json.loads(examined.stdout)}
    assert examined.returncode == 0, examined.stdout
    assert found["canary"]["finding"].startswith(
        "answered by 2 replicas, whose new blocks were seen"
    )


def audited(cluster: Cluster) -> list[dict[str, Any]]:
    """Those in the index."""
    audit = httpx.get(f"{cluster.url}/v1/cluster/audit", timeout=60).raise_for_status().json()
    return list(audit["replicas"])


def drifts(cluster: Cluster) -> set[int | None]:
    return {drift for replica in audited(cluster) for drift in replica["drift"].values()}


@pytest.mark.parametrize("rows", [8, 16, 30])
def test_a_cached_answer_is_the_same_answer(vllm: OpenAI, rows: int) -> None:
    prompt = user(f"{rows} rows.\n{people_table(rows)}\nWho lives in Oslo?")
    cold, cached = ask(vllm, prompt, max_tokens=40), ask(vllm, prompt, max_tokens=40)
    assert cold.cached_tokens == 0
    assert cached.cached_tokens > 60 * rows
    assert cached.text == cold.text


def test_a_replica_tells_vllms_own_metrics_besides_ours(cluster: Cluster, vllm: OpenAI) -> None:
    """From now on: vLLM also counts what was computed for named prefixes."""
    targets = httpx.get(f"{cluster.url}/v1/metrics/targets", timeout=10).json()

    def told(name: str) -> float:
        return sum(sample(target, name) for target in targets)

    ours, vllms = "kvroute_engine_prompt_tokens_total", "vllm:prompt_tokens_total"
    before = told(ours), told(vllms)
    prompts = [user("Count to three."), user("Count to four.")]
    context = sum(ask(vllm, prompt).prompt_tokens for prompt in prompts)
    assert (told(ours) - before[0], told(vllms) - before[1]) == (context, context)


def test_vllm_tells_what_the_dashboards_ask_of_it(cluster: Cluster, vllm: OpenAI) -> None:
    ask(vllm, user("Count to three."))
    targets = httpx.get(f"{cluster.url}/v1/metrics/targets", timeout=10).json()
    (address, *_) = (t["targets"][0] for t in targets if t["labels"]["role"] == "replica")
    families = text_string_to_metric_families(httpx.get(f"http://{address}/metrics").text)
    told = {sample.name for family in families for sample in family.samples}
    context = {name for query in REPLICA.queries() for name in re.findall(r"vllm:\w+", query)}
    assert context
    assert context <= told


def sample(target: dict[str, Any], name: str) -> float:
    """The metric's sum over its labels; 0 where there is none."""
    text = httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text
    families = text_string_to_metric_families(text)
    return sum(s.value for family in families for s in family.samples if s.name == name)


LONG = "You are a careful assistant who knows the weather of every city. " * 40
FLAT = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("path", "first", "more"),
    [
        (
            CHATS,
            {
                "tools": [TOOL],
                "max_tokens": 4,
                "messages": [{"role": "system", "content": LONG}, *ASK],
            },
            {"messages": [{"role": "system", "content": LONG}, *HISTORY]},
        ),
        (
            RESPONSES,
            {"instructions": LONG, "tools": [FLAT], "max_output_tokens": 4, "input": ASK},
            {"input": [*ASK, {"role": "user", "content": "And in Oslo?"}]},
        ),
        (
            MESSAGES,
            {"system": LONG, "max_tokens": 4, "messages": ASK},
            {"messages": [*ASK, {"role": "assistant", "content": "Mild."}, *ASK]},
        ),
    ],
    ids=["chat with tools", "response", "message"],
)
async def test_an_agents_next_turn_goes_where_its_prefix_is(
    cluster: Cluster, path: str, first: Body, more: Body
) -> None:
    def told(body: Body) -> tuple[int, int]:
        """Cached tokens as the router expects them, and as the engine found them."""
        answer = httpx.post(cluster.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        cached = details.get("cached_tokens", details.get("cache_read_input_tokens"))
        return int(answer.headers["x-kvroute-expected-tokens"]), cached

    body = {"model": BUILTIN_MODEL, "temperature": 0, "cache_salt": path.replace("/", "-"), **first}
    assert told(body) == (0, 0)
    await until(lambda: told(body)[0] > 400)
    found: list[tuple[int, int]] = []  # an idle fleet may make a second copy first

    def is_cached() -> bool:
        found.append(told({**body, **more}))
        return found[-1][0] > 400

    await until(is_cached)
    assert found[-1][0] == found[-1][1]


def test_prompts_of_one_call_and_their_receipts_are_one_response(cluster: Cluster) -> None:
    body = {"prompt": ["One, two,", "A, B,", "x"], "n": 2, "max_tokens": 4}
    headers = {"x-kvroute-receipt": "1"}
    for stream in (False, True):
        answer = httpx.post(
            cluster.url + COMPLETIONS,
            json={**body, "stream": stream},
            headers=headers,
            timeout=120,
        )
        assert {int(n) for n in re.findall(r'"index":\s?(\d+)', answer.text)} == set(range(6))
        assert answer.text.count('"expected_tokens":') == 3  # a receipt for each


def test_a_receipt_ends_the_streams_of_every_api(cluster: Cluster) -> None:
    wanted = {"x-kvroute-receipt": "1"}
    ours = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", default_headers=wanted)
    anthropic = Anthropic(base_url=cluster.url, api_key="none", default_headers=wanted)
    model: Any = {"model": BUILTIN_MODEL, "stream": True}
    ask: Any = {"messages": ASK, "max_tokens": 3}
    with ours, anthropic:
        for stream in (
            ours.chat.completions.create(**model, **ask),
            ours.responses.create(**model, input=ASK, max_output_tokens=3),  # type: ignore[arg-type]
            anthropic.messages.create(**model, **ask),
        ):
            assert len([*stream]) > 2  # no library is confused
    for path, body in ((RESPONSES, {"input": ASK}), (MESSAGES, ask)):
        answer = httpx.post(cluster.url + path, json={**model, **body}, headers=wanted, timeout=60)
        *_, last = answer.text.strip().split("\n\n")
        name, data = last.removesuffix("\n\ndata: [DONE]").split("\ndata: ")
        assert name == "event: kvroute.receipts"
        (receipt,) = json.loads(data)["kvroute_receipts"]
        assert receipt["replica"] == answer.headers["x-kvroute-replica"]


def test_what_the_model_cannot_do_is_refused_in_vllms_words(cluster: Cluster) -> None:
    for path, body, said in (
        (CHATS, {"messages": ASK, "temperature": "hot"}, "temperature"),
        (CHATS, {"messages": [], "tools": [TOOL]}, "empty conversation"),
        (MESSAGES, {"messages": ASK}, "max_tokens"),
        ("/v1/embeddings", {"input": "hi"}, "does not support /v1/embeddings"),
    ):
        answer = httpx.post(cluster.url + path, json={"model": BUILTIN_MODEL, **body}, timeout=60)
        assert 400 <= answer.status_code < 500
        assert said in answer.text
        if path != MESSAGES:
            assert answer.json()["error"]["code"] in ALL_CODES


def test_a_named_prefix_stands_before_any_body(cluster: Cluster) -> None:
    shown = httpx.get(f"{cluster.url}/v1/prefixes/law", timeout=10).json()
    for path, body in (
        (CHATS, {"messages": ASK, "tools": [TOOL], "max_tokens": 2}),
        (RESPONSES, {"input": "Say hi", "max_output_tokens": 2}),
        (MESSAGES, {"messages": ASK, "max_tokens": 2}),
    ):
        answer = httpx.post(
            cluster.url + path,
            json={"model": BUILTIN_MODEL, **body},
            headers={"x-kvroute-prefix": "law"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        expected = int(answer.headers["x-kvroute-expected-tokens"])
        assert expected >= shown["full_blocks"] * BLOCK


def test_a_stream_ends_with_its_usage(vllm: OpenAI) -> None:
    events = list(
        vllm.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": "Count to five."}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
    )
    assert events[-1].usage is not None
    tokens = [token for e in events if e.choices for token in logprobs_of(e.choices[0].logprobs)]
    assert events[-1].usage.completion_tokens == len(tokens)


def logprobs_of(logprobs: object) -> list[object]:
    return list(getattr(logprobs, "content", None) or [])


SERIES = (" a b c d e f g", " 1 2 3 4 5 6 7 8", " A B C D E F", " 9 8 7 6 5 4 3 2 1")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[tuple[str, int]]:
    """What the replicas recite while nothing happens to them."""

    async def all_recited() -> list[tuple[str, int]]:
        async with async_openai_client(cluster.url, timeout_s=120) as client:
            return await asyncio.gather(*(recite(client, series, []) for series in SERIES))

    return asyncio.run(all_recited())


# Path and body of what agents ask, of every kind that can be cut anywhere.
AGENTS = [
    *((CHATS, {"messages": ASK, "max_tokens": 24, **own}) for own in CONTINUED.values()),
    *OTHERS.items(),
    MANY_OUTPUTS["two tools"],
]


@pytest.fixture(scope="module")
def undisturbed_agents(cluster: Cluster) -> list[Joined]:
    async def all_answered() -> list[Joined]:
        return await asyncio.gather(*(agents_call(cluster, *call) for call in AGENTS))

    return asyncio.run(all_answered())


async def agents_call(cluster: Cluster, path: str, own: Body) -> Joined:
    """A stream, without what is drawn and dated, with its pieces of text joined."""
    body = {"model": BUILTIN_MODEL, "temperature": 0, "stream": True, **own}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return Joined(comparable(answer.content))


@pytest.mark.parametrize(
    ("is_engine", "blow"),
    [(True, signal.SIGKILL), (False, signal.SIGSTOP)],
    ids=["engine dies", "replica hangs"],
)
async def test_answers_go_on_when_a_process_of_their_replica_dies_or_hangs(
    cluster: Cluster,
    undisturbed: list[tuple[str, int]],
    undisturbed_agents: list[Joined],
    is_engine: bool,
    blow: signal.Signals,
) -> None:
    wait_for_fleet(cluster)
    async with async_openai_client(cluster.url, timeout_s=120) as client:
        pieces: list[str] = []  # the replica that made each
        reciting = asyncio.gather(*(recite(client, series, pieces) for series in SERIES))
        working = asyncio.gather(*(agents_call(cluster, *call) for call in AGENTS))
        await until(lambda: len(pieces) >= 5 * len(SERIES))
        replica = psutil.Process(replicas(cluster)[pieces[0]]["pid"])
        engine = engine_of(replica)
        (engine if is_engine else replica).send_signal(blow)
        assert await reciting == undisturbed
        assert await working == undisturbed_agents
    await until(lambda: pieces[0] not in replicas(cluster), within_s=180)
    await until(lambda: not is_alive(replica) and not is_alive(engine))


def engine_of(replica: psutil.Process) -> psutil.Process:
    """Of the processes that it has started, the largest: that has the model."""
    return max(replica.children(recursive=True), key=lambda child: child.memory_info().rss)


def replicas(cluster: Cluster) -> dict[str, Any]:
    """By id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: replica for replica in listed}


async def recite(client: AsyncOpenAI, series: str, pieces: list[str]) -> tuple[str, int]:
    """A text whose next word is never in doubt, and how many tokens it took."""
    stream = await client.completions.create(
        model=BUILTIN_MODEL,
        prompt=series * 30,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text = ""
    async for event in stream:
        for choice in event.choices:
            text += choice.text
            pieces.append(stream.response.headers["x-kvroute-replica"])
    assert event.usage is not None
    return text, event.usage.completion_tokens


async def test_a_client_that_disconnects_stops_its_engine(vllm: OpenAI, cluster: Cluster) -> None:
    def running() -> int:
        return sum(int(replica["running"]) for replica in replicas(cluster).values())

    stream = vllm.completions.create(
        model=BUILTIN_MODEL, prompt="Once", max_tokens=3000, stream=True
    )
    await until(lambda: running() == 1)
    stream.close()
    await until(lambda: ask(vllm, user("And now?"), max_tokens=2) and running() == 0)
