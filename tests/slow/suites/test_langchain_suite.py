"""LangChain's standard tests of chat models, with ChatOpenAI by chats and by responses."""

import shutil
from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.environments import environment
from tests.support.suites import PLUGINS, SUITE_TIMEOUT_S, Servers, compare, run_pytest

MODULE = "standard_chat_model.py"
MIN_PASSED = 1


@pytest.mark.timeout(3 * SUITE_TIMEOUT_S)
def test_kvroute_passes_what_vllms_server_passes(servers: Servers, tmp_path: Path) -> None:
    shutil.copy(PLUGINS / MODULE, tmp_path)
    kvroute, stock = (
        run_pytest(
            [MODULE],
            *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
            folder=tmp_path,
            env={"KVROUTE_SUITE_URL": url, "KVROUTE_SUITE_MODEL": BUILTIN_MODEL},
            python=environment("langchain-tests"),
        )
        for url in (servers.kvroute, servers.stock)
    )
    compare(kvroute, stock, reasons={}, least_passed=MIN_PASSED)
