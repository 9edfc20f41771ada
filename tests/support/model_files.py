"""The built-in model's files, to be changed."""

import shutil
from pathlib import Path

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve


def copy_model_files(folder: Path) -> Path:
    """All of them but the weights, in this folder."""
    for file in Path(resolve(BUILTIN_MODEL)).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    return folder


def change_template(model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another version #}")
