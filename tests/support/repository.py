"""The checkout's own files, as tests read them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def load(name: str) -> dict[str, Any]:
    """A YAML file."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return loaded


def files_named(environment: Mapping[str, str]) -> dict[str, str]:
    """The same with a file's name in place of its path, which is another one everywhere."""
    return {name: value.rpartition("/")[2] for name, value in environment.items()}
