"""Processes that are forked from one import of vLLM have what spawned ones have."""

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import psutil
import pytest

from kvroute.replica.vllm_engine.process import fork_server
from kvroute.replica.vllm_engine.replaced import BEFORE_START_ON_CPU, apply

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

LATER = "KVROUTE_TEST_LATER"
GONE = "KVROUTE_TEST_GONE"


@pytest.fixture
def one_core() -> Iterator[int]:
    """This thread's."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield max(before)
    os.sched_setaffinity(0, before)


def test_vllms_processes_are_forked_with_the_environment_and_cores_of_their_starter(
    monkeypatch: pytest.MonkeyPatch, one_core: int
) -> None:
    monkeypatch.setenv(GONE, "1")
    fork_server.start(threads=1)
    monkeypatch.delenv(GONE)
    monkeypatch.setenv(LATER, "2")
    apply(BEFORE_START_ON_CPU)
    from vllm.v1.engine.utils import get_mp_context

    context = get_mp_context()
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(telling,))
    process.start()
    parent, environment, cores, collects, has_imported = told.recv()
    process.join(60)  # on a busy machine
    assert process.exitcode == 0
    assert "multiprocessing.forkserver" in " ".join(psutil.Process(parent).cmdline())
    assert environment.get(LATER) == "2"
    assert GONE not in environment
    assert cores == {one_core}
    assert collects
    assert has_imported


@pytest.mark.parametrize("module", ["coordinator", "utils"])
def test_vllm_starts_its_processes_by_what_is_replaced(module: str) -> None:
    source = inspect.getsource(importlib.import_module(f"vllm.v1.engine.{module}"))
    assert "context = get_mp_context()\n" in source
    assert "context.Process(" in source


def tell(pipe: Connection) -> None:
    has_imported = "vllm.v1.engine.core" in sys.modules
    environment = dict(os.environ)
    pipe.send((os.getppid(), environment, os.sched_getaffinity(0), gc.isenabled(), has_imported))


def test_the_fork_server_begins_without_a_change_of_the_environment() -> None:
    before = dict(os.environ)
    fork_server.start(threads=3)
    assert dict(os.environ) == before
