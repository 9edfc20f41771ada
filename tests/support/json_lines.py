"""Reads files of JSON lines to which a process may be writing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the values of all complete lines. The last line may be incomplete."""
    texts = [file.read_text() for file in files]
    return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
