"""vLLM's own tests of its HTTP API, against kvroute and against vLLM's server.

They come from the source archive of the pinned vLLM.
"""

import re
from pathlib import Path

import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.documents import API
from tests.support.source_archives import source_archive, unpack
from tests.support.suites import SUITE_TIMEOUT_S, Outcomes, Servers, compare, run_pytest

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
NEEDED = ("tests/__init__.py", "tests/utils.py")
ENTRYPOINTS = "tests/entrypoints/"

# Below tests/entrypoints. Left out: adapters, images, sounds, prompts as embeddings, parsers of one
# model, options that a server must be started with, and libraries that we do not have.
MODULES = (
    "anthropic/test_messages.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/tokenize/test_tokenization.py",
    "generate/generative_scoring/test_generative_scoring_e2e.py",
)
# Tests that sample and are left to chance: they need two different answers, or one that ends in
# time.
LEFT_OUT = (
    "anthropic/test_messages.py::test_anthropic_structured_output",
    "openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat",
    "openai/chat_completion/test_chat.py::test_structured_outputs_json_chat",
    "openai/chat_completion/test_chat.py::test_structured_outputs_regex_chat",
)
# The names of models in these tests. Our model takes the place of each.
MODEL_NAMES = re.compile(
    r'"(?:claude-3-7-sonnet-latest'
    r'|(?:Qwen|openai-community|facebook|HuggingFaceTB|HuggingFaceH4)/[\w.-]+)"'
)
# Modules or tests below tests.entrypoints that kvroute fails, and the difference in docs/api.md.
REASONS = {
    "anthropic.test_messages::test_anthropic_streaming": "`message_start`",
    "openai.chat_completion.test_chat_completion::test_kv_transfer_": "`kv_transfer_params`",
    "openai.chat_completion.test_chat::test_long_seed": "`seed`",
    "openai.responses.test_stateful::test_background_error": "`background`",
}
MIN_PASSED = 90  # 94 of 152 pass on kvroute


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, suite_model: Path) -> Path:
    """Return a folder with vLLM's tests, and the model under its served name for tokenizers."""
    folder = tmp_path_factory.mktemp("suite")
    archive = source_archive("vllm", VERSION, sha256=SHA256)
    unpack(archive, folder, wanted=lambda name: name in NEEDED or name.startswith(ENTRYPOINTS))
    for module in MODULES:
        file = folder / ENTRYPOINTS / module
        file.write_text(MODEL_NAMES.sub(f'"{BUILTIN_MODEL}"', file.read_text()))
    (folder / BUILTIN_MODEL).symlink_to(suite_model)
    return folder


def outcomes(suite: Path, url: str) -> Outcomes:
    """Run vLLM's tests against the server at this address."""
    return run_pytest(
        [ENTRYPOINTS + module for module in MODULES],
        *("-p", "running_server"),
        *(f"--deselect={ENTRYPOINTS}{test}" for test in LEFT_OUT),
        folder=suite,
        env={"KVROUTE_SUITE_URL": url, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.timeout(3 * SUITE_TIMEOUT_S)
def test_kvroute_passes_what_vllms_server_passes(suite: Path, servers: Servers) -> None:
    kvroute, stock = outcomes(suite, servers.kvroute), outcomes(suite, servers.stock)
    reasons = {ENTRYPOINTS.replace("/", ".") + name: reason for name, reason in REASONS.items()}
    compare(kvroute, stock, reasons=reasons, least_passed=MIN_PASSED)


@pytest.mark.parametrize("subject", REASONS.values())
def test_documents_name_what_kvroute_lacks(subject: str) -> None:
    _, _, section = API.read_text().partition("## Differences from vLLM's server")
    assert subject in section
