"""Break one promise after another, and show that `make test` notices each.

`.venv/bin/python -m tests.mutations` copies the checkout for each mutation, changes one line of
the product there, and runs the tests of `make test` until the first one fails. Name mutations to
run only these; without names, the tests are run without any mutation first. The exit code is 1 if
a mutation is not noticed. Takes half an hour.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

# The tests of `make test`: those that take a minute, then the others.
STAGES = (("tests/unit", "tests/features", "tests/redis"), ("tests/cluster", "tests/vllm"))
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "dist", ".*_cache", ".hypothesis")
PYTEST = ("-m", "pytest", "-q", "--exitfirst", "--numprocesses", "2", "--dist", "loadscope")
IN_ORDER = ("--no-loadscope-reorder", "-p", "no:cacheprovider")
# This module looks for the lines of the mutations, so it would notice each of them.
WITHOUT = "--ignore=tests/unit/test_mutations.py"


@dataclass(frozen=True)
class Mutation:
    """A line of the product, and the line that replaces it to break a promise to users."""

    promise: str
    file: str
    line: str
    broken: str


MUTATIONS = {
    "placement": Mutation(
        "a request goes where its prompt is cached",
        "router/placement/policy.py",
        "own_s, copy_s = candidate.own_s, candidate.copy_s",
        "own_s, copy_s = candidate.own_s, 0.0",
    ),
    "evictions": Mutation(
        "the index forgets what an engine has evicted",
        "replica/block_table.py",
        "            changes.remove(published)",
        "            pass",
    ),
    "continuation": Mutation(
        "a lost replica costs no answer",
        "router/dispatch/generation.py",
        "return self._parts_can_continue or not self._has_data",
        "return not self._has_data",
    ),
    "remainder": Mutation(
        "an answer that goes on elsewhere has no token more or less",
        "replica/vllm_engine/core/continued.py",
        "params.max_tokens = (params.max_tokens or 0) - len(answered)",
        "params.max_tokens = params.max_tokens or 0",
    ),
    "outage": Mutation(
        "an outage of Redis heals by itself",
        "router/index/feed.py",
        "            except REDIS_ERRORS as error:\n                self._outage.begin",
        "            except RecursionError as error:\n                self._outage.begin",
    ),
    "tenants": Mutation(
        "no tenant finds what another one has cached",
        "kvroute/blocks/fingerprint.py",
        '{variant}|{namespace}"',
        '{variant}|"',
    ),
    "keys": Mutation(
        "an API key allows what its roles allow, and nothing else",
        "kvroute/features/keys/key_gate.py",
        "if caller.roles.isdisjoint(roles):",
        "if not roles:",
    ),
    "adapters": Mutation(
        "a name of an adapter that is used again finds no blocks of the earlier weights",
        "kvroute/features/adapters/added.py",
        'return f"{self.id}@{self.digest}"',
        "return f\"{self.id}@{32 * '0'}\"",
    ),
    "removals": Mutation(
        "an adapter is removed after the last request of every router",
        "kvroute/features/adapters/adapter_store.py",
        "if not waiting <= members or (",
        "if (",
    ),
    "prefixes": Mutation(
        "a named prefix is cached before its first request",
        "kvroute/features/prefixes/warmer.py",
        "        await self._warm(pinned, ",
        "        await self._warm([], ",
    ),
    "ledger": Mutation(
        "every prompt token has one cause in the ledger",
        "router/placement/ledger.py",
        '"evicted": until(known),',
        '"evicted": 0 * until(known),',
    ),
    "queue": Mutation(
        "a request that would wait too long is refused at once",
        "router/queueing/holding.py",
        "if upper_s > urgency.max_wait_s:",
        "if upper_s > 1000 * urgency.max_wait_s:",
    ),
    "conversations": Mutation(
        "a response goes on with the conversation before it",
        "kvroute/features/responses/continuing.py",
        "call = self._with_turns(call, own, turns)",
        "pass",
    ),
    "templates": Mutation(
        "a router renders chats as vLLM does",
        "router/prompts/chat_template.py",
        'body.get("add_generation_prompt", True)',
        'body.get("add_generation_prompt", False)',
    ),
}


def broken_copy(mutation: Mutation, folder: Path) -> Path:
    """Copy the checkout into the folder, with the mutation in it; return the copy's path."""
    copy = folder / "kvroute"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    file = copy / mutation.file
    text = file.read_text()
    assert text.count(mutation.line) == 1, f"{mutation.file} has not one {mutation.line!r}"
    file.write_text(text.replace(mutation.line, mutation.broken))
    return copy


def first_failure(copy: Path) -> str:
    """Run the tests of `make test` in a copy; return the first that fails, or an empty string."""
    return next(filter(None, (first_of(copy, folders) for folders in STAGES)), "")


def first_of(copy: Path, folders: Sequence[str]) -> str:
    """Run the tests of these folders; return the first that fails, or an empty string."""
    done = subprocess.run(
        [sys.executable, *PYTEST, *IN_ORDER, WITHOUT, *folders],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},  # all processes import the copy
        capture_output=True,
        text=True,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    assert failed or done.returncode == 0, done.stdout + done.stderr
    return failed[0] if failed else ""


def main() -> int:
    """Run the mutations that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MUTATIONS], metavar="NAME")
    chosen = parser.parse_args().names
    if not chosen and (broken := first_failure(ROOT)):
        sys.exit(f"without any mutation, {broken} fails: mend that first")
    names = chosen or list(MUTATIONS)
    missed = 0
    for name in names:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            failure = first_failure(broken_copy(MUTATIONS[name], Path(folder)))
        missed += not failure
        took = f"{time.monotonic() - began_s:4.0f} s"
        print(
            f"{name:14} {took}  {failure or 'NOT NOTICED'}  ({MUTATIONS[name].promise})", flush=True
        )
    print(f"{len(names) - missed} of {len(names)} mutations noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
