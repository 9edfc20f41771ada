"""Which build of vLLM is installed, without its import."""

import importlib.metadata


def is_for_gpus() -> bool:
    """vLLM for CPUs is a package of another name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
