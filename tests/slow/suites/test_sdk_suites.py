"""The generated tests of OpenAI's and Anthropic's Python libraries, of the routes that kvroute has.

They were written for a mock server: they check that a response has the type that the library
declares. Tests that send fields which vLLM does not take fail on both servers.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.environments import environment
from tests.support.source_archives import source_archive, unpack
from tests.support.suites import SUITE_TIMEOUT_S, Servers, compare, run_pytest


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library's source archive, and the part of its tests that is run."""

    name: str
    version: str
    sha256: str
    modules: tuple[str, ...]  # below tests/api_resources
    base_path: str = ""  # of the server's address that the library takes
    least_passed: int


OPENAI = Library(
    name="openai",
    version="3.52.0",
    sha256="258a4fec3e40b412c58672526ed33f20738c2e4ea27601792e73843af62466af",
    modules=(
        "chat/test_completions.py",
        "test_completions.py",
        "test_models.py",
        "test_responses.py",
    ),
    base_path="/v1",
    least_passed=120,  # 135 of 365 pass on kvroute
)
ANTHROPIC = Library(
    name="anthropic",
    version="2.11.0",
    sha256="205711189d0bdbee78e5bb45b97944e7b42af3e2dce33ce8dacbf80f9492dc00",
    modules=("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py"),
    least_passed=120,  # 136 of 215 pass on kvroute
)
# The names of models in these tests. Our model takes the place of each.
MODEL_NAMES = re.compile(
    r'"(?:gpt|claude)-[\w.-]+"|(?<=model=)"string"|(?<=_id=)"(?:model|after|before)_id"'
)


@pytest.mark.timeout(3 * SUITE_TIMEOUT_S)
@pytest.mark.parametrize("library", [OPENAI, ANTHROPIC], ids=lambda library: library.name)
def test_kvroute_passes_what_vllms_server_passes(
    library: Library, servers: Servers, tmp_path: Path
) -> None:
    archive = source_archive(library.name, library.version, sha256=library.sha256)
    unpack(archive, tmp_path, wanted=lambda name: name.startswith("tests/"))
    for module in library.modules:
        file = tmp_path / "tests/api_resources" / module
        file.write_text(MODEL_NAMES.sub(f'"{BUILTIN_MODEL}"', file.read_text()))
    kvroute, stock = (
        run_pytest(
            [f"tests/api_resources/{module}" for module in library.modules],
            *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=session"),
            folder=tmp_path,
            env={"TEST_API_BASE_URL": url + library.base_path},
            python=environment("sdk-tests"),
        )
        for url in (servers.kvroute, servers.stock)
    )
    compare(kvroute, stock, reasons={}, least_passed=library.least_passed)
