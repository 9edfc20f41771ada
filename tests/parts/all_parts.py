"""The parts of `make test-all`. Each module of tests belongs to exactly one of them.

A part takes at most 15 minutes on two cores. `make test-all ARGS=--modules` lists how long each
module took, so that the grouping can be corrected.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.environments import environment
from tests.support.repository import ROOT

TIMEOUT_S = 1800  # that a test may take: on a busy machine, some take longer than make test allows
WORKERS = ("--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder")
PYTEST = ("-m", "pytest", "--timeout", f"{TIMEOUT_S}", *WORKERS)
COUNTING = ("-p", "tests.parts.counting")
SLOW = "slow"  # a folder in that of a feature, with tests that only `make test-all` runs
FUZZ = {"KVROUTE_FUZZ": "24000"}
ON_VLLM = {**FUZZ, "KVROUTE_FUZZ_CLUSTER": "vllm_cluster"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tests that run together: modules for pytest, or another command."""

    about: str  # a line for users
    tests: tuple[str, ...] = ()  # folders and modules below tests/
    options: tuple[str, ...] = ()  # of pytest
    command: tuple[str, ...] = ()  # instead of pytest
    env: Mapping[str, str] = field(default_factory=dict)  # other settings of these tests
    lock: str = ""  # name of an environment with other versions
    needs: str = ""
    reads_all: bool = False  # whether a change of any file can change its result

    @property
    def owns_tests(self) -> bool:
        """Return whether its modules belong to it, and are not those of another part, run again."""
        return not (self.env or self.lock)

    def modules(self) -> set[Path]:
        """Return the part's modules of tests. Fails if a path does not exist."""
        found = set[Path]()
        for name in self.tests:
            path = ROOT / "tests" / name
            assert path.exists(), f"there is no tests/{name}"
            modules = {*path.rglob("test_*.py")} if path.is_dir() else {path}
            found |= {each for each in modules if path.name == SLOW or each.parent.name != SLOW}
        return found

    def cannot_notice(self, changed: Collection[Path]) -> bool:
        """Return whether these changed files are only modules of tests that other parts run."""
        modules = {*(ROOT / "tests").rglob("test_*.py")} - self.modules()
        return not self.reads_all and {*changed} <= modules

    def arguments(self) -> tuple[str, ...]:
        """Return the command that runs the part. Raises pytest's Skipped if it cannot run here."""
        if self.command:
            return self.command
        python = str(environment(self.lock, with_ours=True)) if self.lock else sys.executable
        paths = (str(Path("tests", name)) for name in self.tests)
        return (python, *PYTEST, *COUNTING, *self.options, *paths)


def _in(folder: str, names: str) -> tuple[str, ...]:
    """Return the paths of a folder's modules, from names without "test_" and ".py"."""
    return tuple(f"slow/{folder}/test_{name}.py" for name in names.split())


def _of_features(initials: str) -> tuple[str, ...]:
    """Return the folders of the slow tests of features, by the first letters of their names."""
    tests = ROOT / "tests"
    found = tests.glob(f"features/[{initials}]*/{SLOW}")
    return tuple(sorted(str(path.relative_to(tests)) for path in found))


# What `make test` runs.
TIERS = {
    "lint": Part(about="formatting, lint and types", command=("make", "lint"), reads_all=True),
    "unit": Part(
        about="tests of functions, classes and features",
        tests=("unit", "features"),
        reads_all=True,
    ),
    "redis": Part(about="tests on a Redis", tests=("redis",)),
    "cluster": Part(about="a simulated cluster and the official clients", tests=("cluster",)),
    "vllm": Part(about="a cluster of vLLM engines and the official clients", tests=("vllm",)),
}
CLUSTERS = {
    "clusters": Part(
        about="simulated clusters that several modules share; load balancers; the live page",
        tests=("slow/clusters", "slow/replay", "slow/redis"),
    ),
    "access": Part(
        about="encryption, other users of the machine",
        tests=_in("own_cluster", "other_users inside wire_tls"),
    ),
    "queues": Part(
        about="the queue and batches",
        tests=_in("own_cluster", "queue queue_seen long_prompt idle_connections"),
    ),
    "fleets": Part(
        about="fleets that start, stop, grow, are mixed or upgraded",
        tests=_in(
            "own_cluster",
            "autoscaled_cluster mixed_fleet upgrade start_and_stop"
            " last_answers watched_cluster losses_at_the_start",
        ),
    ),
    "survival": Part(
        about="hours of use, faults, a full disk or memory, broken hooks and what the doctor finds",
        tests=_in("own_cluster", "soak chaos full_disk full_memory broken_hook diagnosis"),
        needs="root for the full disk",
    ),
    "vllm-clusters": Part(
        about="clusters of vLLM engines with several models or ranks",
        tests=_in("own_cluster", "vllm_cluster models ranks_cluster full_caches"),
    ),
    "caches": Part(
        about="clusters, and attached servers, with host memory",
        tests=_in("own_cluster", "host_memory attached_host_memory"),
    ),
    "attached": Part(
        about="attached servers; models that see or embed",
        tests=_in("own_cluster", "attached_cluster seeing_and_embedding"),
    ),
}
# Those that can run with the oldest vLLM that kvroute supports.
ENGINES = {
    "engines": Part(
        about="simulated and vLLM engines: requests, answers, adapters",
        tests=_in(
            "engines",
            "engine http_app hostile_bodies keep stream_interval lora_engine order"
            " resumed_answers engine_args media_spans fork_server fail_fast",
        ),
    ),
    "engine-models": Part(
        about="engines of models of many kinds",
        tests=_in(
            "engines",
            "builtin_model chat_templates models_of_today images recordings pooling reasoning"
            " kv_groups ranks_engine",
        ),
    ),
    "engine-caches": Part(
        about="eviction, host memory, disks and blocks from other engines",
        tests=_in(
            "engines",
            "batch_lane disk_index disk_tier encrypted_pull engine_model free_queue hit_rule"
            " host_policy host_scheduler host_tier preemption pull pull_faults slower_tiers",
        ),
    ),
}
OTHERS = {
    "features-a-to-f": Part(
        about="clusters that use one feature, with a name from a to f",
        tests=_of_features("a-f"),
        needs="the network, once",
    ),
    "features-g-to-z": Part(
        about="clusters that use one feature, with a name from g to z",
        tests=_of_features("g-z"),
    ),
    "without-features": Part(
        about="types and tests of copies of this checkout without features",
        tests=("slow/features",),
        reads_all=True,
    ),
    "engine-starts": Part(
        about="engines that cannot start, and the steps of the pages for contributors",
        tests=(*_in("engines", "cannot_run contributing_steps"), "slow/versions"),
        reads_all=True,
    ),
    "clients": Part(
        about="other client libraries on vLLM engines, and coding agents",
        tests=("slow/clients",),
        needs="Node.js, and the network, once",
    ),
    "suites": Part(
        about="vLLM's own tests, and those of LangChain and Open Responses",
        tests=_in("suites", "vllm_suite langchain_suite open_responses_suite"),
        needs="the network, once",
    ),
    "sdk-suites": Part(
        about="the tests of the SDKs, lm-eval and vllm bench serve",
        tests=_in("suites", "sdk_suites lm_eval_suite bench_serve"),
        needs="the network, once",
    ),
    "audit": Part(
        about="no locked package has a known vulnerability",
        tests=("slow/audit",),
        needs="the network",
    ),
    "site": Part(
        about="the website of the documents has no broken link: `make site`",
        command=("make", "site"),
        needs="the network, once",
        reads_all=True,
    ),
    "bare-machine": Part(
        about="the README's two commands on a minimal Debian",
        tests=("slow/bare_machine",),
        needs="root, debootstrap, the network",
        reads_all=True,
    ),
    "image": Part(
        about="the container image: `make image-test`",
        tests=("slow/image",),
        options=("--numprocesses", "0"),  # so that the image is built only once
        needs="root, podman, the network",
    ),
    "nodes": Part(
        about="nodes that fail, on hosts made of namespaces: `make test-cluster`",
        tests=("slow/nodes",),
        options=("-m", "nodes", "--numprocesses", "0"),
        needs="root",
    ),
    "chaos": Part(
        about="faults one by one and two at a time: `make chaos`",
        command=(sys.executable, "-W", "ignore", "-m", "tests.chaos"),
        needs="root for the full disk",
    ),
    "fuzz": Part(
        about="24,000 random requests to simulated replicas",
        tests=("cluster/test_fuzz.py",),
        env=FUZZ,
    ),
    "fuzz-vllm": Part(
        about="24,000 random requests to vLLM replicas",
        tests=("cluster/test_fuzz.py",),
        env=ON_VLLM,
    ),
    "fuzz-keys": Part(
        about="24,000 random requests with API keys",
        tests=("features/keys/slow/test_api_keys.py",),
        options=("-k", "any_"),
        env=FUZZ,
    ),
}
# The tests of the engines again, with the oldest vLLM that kvroute supports.
OLDER = {
    f"older-vllm-{name}": Part(
        about=f"{name} again, with vLLM 0.31",
        tests=part.tests,
        lock="older-vllm",
        needs="the network, once",
    )
    for name, part in ENGINES.items()
}
PARTS: Mapping[str, Part] = {**TIERS, **CLUSTERS, **ENGINES, **OTHERS, **OLDER}


def parts_table() -> str:
    """Return the table of docs/tests.md."""
    rows = (f"| `{name}` | {part.about} | {part.needs} |\n" for name, part in PARTS.items())
    return "| part | tests | needs |\n|---|---|---|\n" + "".join(rows)
