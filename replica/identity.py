"""What replica and router must have in common for the blocks of the one to help the other."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replica.adapters import Adapter, digests
from replica.kvindex.fingerprint import FINGERPRINT_VERSION

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first that there is
TEMPLATE_FILE = "chat_template.jinja"  # before what tokenizer_config.json has
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """Part of a replica's facts. Digests are of the model's files; empty: there is no such file."""

    fingerprint_version: str
    revision: str
    block_size: int  # tokens
    tokenizer_digest: str
    template_digest: str
    adapters: Mapping[str, str] = field(default_factory=dict)  # digests by name


def identify(
    model: str, *, revision: str, block_size: int, adapters: Iterable[Adapter] = ()
) -> Identity:
    """model: a folder, or a hub name whose files were fetched before."""
    return Identity(
        fingerprint_version=FINGERPRINT_VERSION,
        revision=revision,
        block_size=block_size,
        tokenizer_digest=_digest(_tokenizer(model, revision)),
        template_digest=_digest(_template(model, revision)),
        adapters=digests(adapters),
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def _tokenizer(model: str, revision: str) -> bytes:
    contents = (_read(model, name, revision) for name in TOKENIZER_FILES)
    return next(filter(None, contents), b"")


def _template(model: str, revision: str) -> bytes:
    if template := _read(model, TEMPLATE_FILE, revision):
        return template
    config: dict[str, Any] = json.loads(_read(model, CONFIG_FILE, revision) or b"{}")
    in_config = config.get("chat_template")
    return json.dumps(in_config).encode() if in_config else b""


def _read(model: str, name: str, revision: str) -> bytes:
    """Empty where the model has no such file."""
    path = Path(model) / name if Path(model).is_dir() else _cached(model, name, revision)
    return path.read_bytes() if path and path.is_file() else b""


def _cached(model: str, name: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name, revision=revision or None)
    return Path(found) if isinstance(found, str) else None
