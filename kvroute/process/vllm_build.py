"""Detects which build of vLLM is installed, without its import."""

import importlib.metadata


def is_for_gpus() -> bool:
    """Return whether vLLM is installed in its build for GPUs.

    vLLM for CPUs is a package of another name, or has "+cpu" in its version.
    """
    try:
        return "+cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
