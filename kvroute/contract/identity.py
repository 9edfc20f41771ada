"""The properties that must be equal in a replica and a router for their fingerprints to match."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from kvroute.blocks.fingerprint import FINGERPRINT_VERSION

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first file that exists is used
TEMPLATE_FILE = "chat_template.jinja"  # has priority over the template in CONFIG_FILE
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"

NO_VARIANTS: Mapping[str, str] = MappingProxyType({})

Digest = Annotated[str, Meta(max_length=128)]


class Identity(Struct, frozen=True):
    """The properties of one model as a replica or a router has loaded it.

    The digest of a file is empty if the model has no such file.
    """

    fingerprint_version: Digest
    revision: Annotated[str, Meta(max_length=1024)]
    block_size: Annotated[int, Meta(ge=1, le=2**48)]  # tokens
    tokenizer_digest: Digest
    template_digest: Digest
    # Digests of the variants that the model has from the start, by name.
    variants: dict[str, Digest] = field(default_factory=dict, name="adapters")


def identify(
    model: str, *, revision: str, block_size: int, variants: Mapping[str, str] = NO_VARIANTS
) -> Identity:
    """Return the identity of a model.

    Args:
        model: a folder, or a name on the Hugging Face hub whose files are in the local cache.
        revision: the revision on the hub; empty: the default revision.
        block_size: number of tokens that one fingerprint covers.
        variants: digests of the variants that the model has from the start, by name.
    """
    return Identity(
        fingerprint_version=FINGERPRINT_VERSION,
        revision=revision,
        block_size=block_size,
        tokenizer_digest=_digest(_tokenizer(model, revision)),
        template_digest=_digest(_template(model, revision)),
        variants=dict(variants),
    )


def chat_template(model: str, revision: str) -> str:
    """Return the text of the model's chat template; several are joined; empty: it has none.

    Args:
        model: a folder, or a hub name whose files are in the local cache.
        revision: the hub's revision; empty: the default.
    """
    if template := _read(model, TEMPLATE_FILE, revision):
        return template.decode()
    in_config = _template_in_config(model, revision) or ""
    if isinstance(in_config, list):  # several templates, each with a name
        in_config = "".join(str(entry.get("template", "")) for entry in in_config)
    return str(in_config)


def usual_max_tokens(model: str, revision: str) -> int | None:
    """Return the limit of an answer's tokens in the model's own settings; None: it has none there.

    Args:
        model: a folder, or a hub name whose files are in the local cache.
        revision: the hub's revision; empty: the default.
    """
    settings = json.loads(_read(model, GENERATION_FILE, revision) or b"{}")
    limit: int | None = settings.get("max_new_tokens")
    return limit


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def _tokenizer(model: str, revision: str) -> bytes:
    contents = (_read(model, name, revision) for name in TOKENIZER_FILES)
    return next(filter(None, contents), b"")


def _template(model: str, revision: str) -> bytes:
    if template := _read(model, TEMPLATE_FILE, revision):
        return template
    in_config = _template_in_config(model, revision)
    return json.dumps(in_config).encode() if in_config else b""


def _template_in_config(model: str, revision: str) -> Any:
    """Return the entry in the tokenizer's configuration: one template, or several with names."""
    return json.loads(_read(model, CONFIG_FILE, revision) or b"{}").get("chat_template")


def _read(model: str, name: str, revision: str) -> bytes:
    """Return a file's content; empty if the model has no such file."""
    path = Path(model) / name if Path(model).is_dir() else cached_file(model, name, revision)
    return path.read_bytes() if path and path.is_file() else b""


def cached_file(model: str, name: str, revision: str = "") -> Path | None:
    """Return a file of a model in the local cache of Hugging Face's hub; None: it is not there."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, name, revision=revision or None)
    return Path(path) if isinstance(path, str) else None
