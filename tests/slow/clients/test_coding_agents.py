"""Coding agents and libraries for agents finish sessions of ten turns with tools, and hit caches.

A script stands in for the model, since the prompts of these agents take minutes on a CPU. Its two
servers are attached. One of them, which answers the session, is killed in the middle. A short
session of Codex has a real engine.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest
from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool

from tests.support.clients import async_openai_client
from tests.support.scripted_model import NAME, SAID, ScriptedServer, scripted_servers
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import wait_until

NPM = Path(__file__).parent / "npm"
CACHE = Path.home() / ".cache/kvroute/npm"
TURNS = 10  # results of tools, after which the script is done
KILL_AFTER = 4  # turns
TIMEOUT_S = 300.0
# Of each turn's prompt, at least this share came before in the same session. The first turn at the
# second server has nothing in its cache.
CACHED_SHARE = 0.7


@pytest.fixture(scope="module")
def npm() -> Path:
    """Return the folder with the programs of npm's lock; it is filled once."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    lock = (NPM / "package-lock.json").read_bytes()
    folder = CACHE / hashlib.sha256(lock).hexdigest()[:12]
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(NPM / file, folder)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the packages cannot be installed: {done.stderr[-1000:]}")
        install = folder / "node_modules/@anthropic-ai/claude-code/install.cjs"
        subprocess.run(["node", str(install)], cwd=folder, check=True, capture_output=True)
        (folder / "ready").touch()
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ScriptedServer]]:
    with scripted_servers(2, turns=TURNS, folder=tmp_path_factory.mktemp("scripted")) as running:
        yield running


@pytest.fixture(scope="module")
def front(servers: list[ScriptedServer]) -> Iterator[Cluster]:
    options = [option for server in servers for option in ("--attach", server.url)]
    with start_cluster(*options, "--response-store-mb", "64") as running:
        yield running


def start_all(front: Cluster, servers: list[ScriptedServer]) -> None:
    """Start all servers with empty caches, and wait until kvroute uses them."""
    for server in servers:
        server.start()
    wait_until(lambda: httpx.get(f"{front.url}/health").json()["replicas"] == len(servers))


@contextmanager
def losing_its_server(front: Cluster, servers: list[ScriptedServer]) -> Iterator[None]:
    """Kill the server that answers the context's session after some turns.

    Before, both servers run and have nothing in their caches. Afterwards, the session has had one
    turn without any hit at the second server, and hits in all others.
    """
    start_all(front, servers)

    def kill() -> None:
        wait_until(lambda: any(len(server.turns()) >= KILL_AFTER for server in servers), TIMEOUT_S)
        max(servers, key=lambda server: len(server.turns())).kill()

    killer = Thread(target=kill)
    killer.start()
    yield
    killer.join()
    shares = [[turn.cached / turn.prompt for turn in server.turns()] for server in servers]
    assert all(shares), shares  # both have answered
    assert sum(map(len, shares)) >= TURNS + 1
    assert min(share for of_one in shares for share in of_one[1:]) > CACHED_SHARE, shares


def run(*command: str | Path, folder: Path, env: Mapping[str, str]) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


CODEX = """
model = "{model}"
model_provider = "kvroute"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.kvroute]
name = "kvroute"
base_url = "{url}/v1"
wire_api = "responses"
"""


def test_codex(npm: Path, front: Cluster, servers: list[ScriptedServer], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CODEX.format(model=NAME, url=front.url))
    with losing_its_server(front, servers):
        printed = run(
            *(npm / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--json"),
            "Run ten steps.",
            folder=tmp_path,
            env={"CODEX_HOME": str(tmp_path)},
        )
    items = [json.loads(line).get("item", {}) for line in printed.splitlines()]
    outputs = [item.get("aggregated_output") for item in items if item.get("exit_code") == 0]
    assert outputs == [f"step {number}\n" for number in range(TURNS)]
    assert items[-2]["text"] == SAID


def test_codex_compacts_a_long_session(
    npm: Path, front: Cluster, servers: list[ScriptedServer], tmp_path: Path
) -> None:
    """The limit is reached after the first turn; Codex goes on with the model's summary."""
    start_all(front, servers)
    (tmp_path / "config.toml").write_text(CODEX.format(model=NAME, url=front.url))
    run(
        *(npm / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", "Run ten steps."),
        *("-c", "model_auto_compact_token_limit=1000", "--output-last-message", tmp_path / "last"),
        folder=tmp_path,
        env={"CODEX_HOME": str(tmp_path)},
    )
    assert (tmp_path / "last").read_text() == SAID
    turns = [turn for server in servers for turn in server.turns()]
    assert len(turns) < TURNS


def test_codex_on_a_real_engine(npm: Path, tmp_path: Path) -> None:
    """The prompt has 4,600 tokens, and the model is too small to say something sensible."""
    few = {"tool_call_parser": "hermes", "override_generation_config": {"max_new_tokens": 8}}
    options = ("--max-model-len", "40960", "--kv-cache-memory-mb", "2500", "--replicas", "1")
    with start_cluster(
        *options,
        *("--engine-args", json.dumps(few)),
        env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    ) as real:
        name = httpx.get(f"{real.url}/v1/models").json()["data"][0]["id"]
        (tmp_path / "config.toml").write_text(CODEX.format(model=name, url=real.url))
        codex = (npm / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--json")
        usage: list[dict[str, int]] = []  # of the session, after each turn
        for turn in (("Hello.",), ("resume", "--last", "And again.")):
            printed = run(*codex, *turn, folder=tmp_path, env={"CODEX_HOME": str(tmp_path)})
            end = json.loads(printed.splitlines()[-1])
            assert end["type"] == "turn.completed", printed
            usage.append(end["usage"])
    cached, tokens = (
        usage[1][f"{kind}input_tokens"] - usage[0][f"{kind}input_tokens"]
        for kind in ("cached_", "")
    )
    assert cached > CACHED_SHARE * tokens, usage


def test_claude_code(
    npm: Path, front: Cluster, servers: list[ScriptedServer], tmp_path: Path
) -> None:
    with losing_its_server(front, servers):
        printed = run(
            *(npm / "node_modules/.bin/claude", "--print", "Run ten steps."),
            *("--output-format", "json", "--allowedTools", "Bash"),
            folder=tmp_path,
            env={
                "ANTHROPIC_BASE_URL": front.url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": NAME,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )
    result = json.loads(printed)
    assert (result["result"], result["num_turns"]) == (SAID, TURNS + 1)
    assert result["usage"]["cache_read_input_tokens"] > result["usage"]["input_tokens"]


def test_the_ai_sdk_with_stored_responses(
    npm: Path, front: Cluster, servers: list[ScriptedServer], tmp_path: Path
) -> None:
    shutil.copy(NPM / "ai_sdk.mjs", npm)
    with losing_its_server(front, servers):
        script = npm / "ai_sdk.mjs"
        printed = run("node", script, front.url, NAME, str(TURNS + 2), folder=tmp_path, env={})
    found = json.loads(printed)
    assert (found["text"], len(found["steps"])) == (SAID, TURNS + 1)


async def test_openais_agents_sdk_with_stored_responses(
    front: Cluster, servers: list[ScriptedServer]
) -> None:
    called: list[str] = []

    @function_tool(name_override="run")  # type: ignore[untyped-decorator]
    def run_command(command: str) -> str:
        """Run a command."""
        called.append(command)
        return f"ran {command}"

    async with async_openai_client(front.url) as client:
        model = OpenAIResponsesModel(NAME, client)
        agent = Agent(
            name="a", instructions="You run commands. " * 400, tools=[run_command], model=model
        )
        with losing_its_server(front, servers):
            result = await Runner.run(
                agent,
                "Run ten steps.",
                max_turns=TURNS + 2,
                auto_previous_response_id=True,
                run_config=RunConfig(tracing_disabled=True),
            )
    assert result.final_output == SAID
    assert called == [f"echo step {number}" for number in range(TURNS)]
