"""Detects which build of vLLM is installed, without importing vLLM."""

import importlib.metadata


def is_for_gpus() -> bool:
    """Return whether the installed vLLM is the build for GPUs.

    The build for CPUs is a package with another name, or has "+cpu" in its version.
    """
    try:
        return "+cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
