"""Files of JSON lines that a process may be writing."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Every whole line: of the last one, a reader may see a part."""
    texts = [file.read_text() for file in files]
    return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]
