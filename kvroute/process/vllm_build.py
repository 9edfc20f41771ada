"""Which build of vLLM is installed, without its import."""

import importlib.metadata


def is_for_gpus() -> bool:
    """vLLM for CPUs is a package of another name, or says so in its version."""
    try:
        return "+cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
