"""Reads files of this checkout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvroute"
LINKED = ("replica", "router")  # folders at the top of the tree that the package links to


def product_modules() -> list[Path]:
    """Return the Python files of the package, including linked folders, sorted by path."""
    folders = (PACKAGE, *(PACKAGE / name for name in LINKED))
    return sorted({file for folder in folders for file in folder.rglob("*.py")})


def load(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of the checkout."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return loaded


def files_named(environment: Mapping[str, str]) -> dict[str, str]:
    """Replace each path by the name of its file: the folder differs between machines."""
    return {name: value.rpartition("/")[2] for name, value in environment.items()}
