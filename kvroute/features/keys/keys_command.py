"""The command `kvroute keys`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvroute.client import fail
from kvroute.command.help_page import HelpfulCommand, typer_app
from kvroute.command.tables import Column, print_table
from kvroute.contract.priority import PRIORITIES, Priority, parse_priority
from kvroute.features.gate import ROLES, TENANT, Role
from kvroute.features.keys.key_file import (
    KeyFileError,
    locked,
    new_file,
    new_key,
    read,
    write,
)
from kvroute.features.keys.limits import ANY, OTHER, TenantLimits

NONE = "none"  # value of an option that removes the limit
NAMES = {  # field of TenantLimits -> option
    field: f"--{field.replace('_', '-')}" for field in TenantLimits.__struct_fields__
}
WORDING = {  # msgspec's wording -> kvroute's
    "Expected": "expected",
    "`int` >= ": "a whole number of at least ",
    "`int` <= ": "a whole number of at most ",
    "`str` of length <= ": "a name whose number of characters is at most ",
}
NAMES["adapters"] = "--adapter"

COLUMNS = ("id", "tenant", "roles", "priority", "created")

File = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="KVROUTE_API_KEYS",
        show_envvar=True,
        help="The file that kvroute serve --api-keys reads.",
    ),
]

keys = typer_app(
    no_args_is_help=True,
    help="API keys of a cluster. Routers read the file again within seconds after a change.",
)


@keys.command(cls=HelpfulCommand)
def add(
    tenant: Annotated[
        str, typer.Option(help="Tenant that the key belongs to; tenants share no cache.")
    ],
    file: File,
    role: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What the key may do: {', '.join(ROLES)}. Repeat --role for several.",
            show_default="use",
        ),
    ] = None,
    priority: Annotated[
        str,
        typer.Option(
            help=f"Highest priority of requests with this key: {', '.join(PRIORITIES)}. A request "
            "can set a lower one.",
        ),
    ] = "default",
) -> None:
    """Add a key and print it. The file does not contain it, so it cannot be shown again."""
    roles = _roles(role or ["use"])
    if tenant == OTHER:
        fail(
            f"--tenant is {OTHER!r}, a name that accounts and metrics use for all tenants that "
            "they do not list by name; choose another name"
        )
    try:
        created = datetime.now(UTC).date().isoformat()
        key, entry = new_key(tenant, roles, created, _priority(priority))
    except msgspec.ValidationError:
        fail(f"--tenant is {tenant[:80]!r}; expected up to 64 letters, digits and . _ @ -")
    with _usable(file), locked(file):
        content = read(file) if file.exists() else new_file()
        write(file, msgspec.structs.replace(content, keys=(*content.keys, entry)))
    typer.echo(key)


@keys.command("list", cls=HelpfulCommand)
def list_keys(file: File) -> None:
    """Show all keys, without their secrets, and the tenants' limits."""
    with _usable(file):
        content = read(file)
    rows = [
        [key.id, key.tenant, ", ".join(key.roles), key.priority, key.created]
        for key in content.keys
    ]
    print_table([*map(Column, COLUMNS)], rows)
    if content.tenants:
        typer.echo("\nlimits of tenants:")
    for tenant, limits in sorted(content.tenants.items()):
        typer.echo(f"{tenant}: {_as_options(limits)}")


@keys.command(cls=HelpfulCommand)
def limit(
    tenant: Annotated[
        str,
        typer.Argument(
            metavar="TENANT",
            help="Tenant to limit; '*': all tenants without limits of their own.",
        ),
    ],
    file: File,
    max_requests: Annotated[
        str | None,
        typer.Option(help=f"Requests that run or wait at the same time; {NONE}: no limit."),
    ] = None,
    max_prompt_tokens: Annotated[
        str | None,
        typer.Option(help="Prompt tokens of these requests, cached ones included."),
    ] = None,
    uncached_tokens_per_minute: Annotated[
        str | None, typer.Option(help="Prompt tokens per minute that must be computed.")
    ] = None,
    max_prefixes: Annotated[
        str | None, typer.Option(help="Declared named prefixes per model.")
    ] = None,
    max_pinned_blocks: Annotated[
        str | None, typer.Option(help="Full KV blocks of the tenant's pinned prefixes, per model.")
    ] = None,
    max_files: Annotated[
        str | None, typer.Option(help="Stored files, with the results of batches.")
    ] = None,
    max_file_bytes: Annotated[
        str | None, typer.Option(help="Bytes of all files: uploaded files, and results of batches.")
    ] = None,
    max_open_batches: Annotated[
        str | None, typer.Option(help="Batches that have not ended.")
    ] = None,
    max_adapters: Annotated[
        str | None,
        typer.Option(help="Added LoRA adapters that belong to the tenant, per model."),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            help="A LoRA adapter that the tenant may use. Repeat --adapter for several.",
        ),
    ] = None,
    like_others: Annotated[
        bool,
        typer.Option(
            "--like-others", help="Remove the tenant's own limits, so that those of '*' apply."
        ),
    ] = False,
) -> None:
    """Set limits of a tenant, and keep its other limits.

    The limits of '*' do not apply to a tenant with limits of its own.
    """
    given = {**locals()}
    options = {name: given[name] if given[name] != [] else None for name in NAMES}
    _check_tenant(tenant)
    if like_others and (tenant == ANY or any(value is not None for value in options.values())):
        fail("--like-others needs the name of one tenant, and no other option may be set with it")
    with _usable(file), locked(file):
        content = read(file)
        others = {name: limits for name, limits in content.tenants.items() if name != tenant}
        before = content.tenants.get(tenant, TenantLimits())
        after = None if like_others else _updated(before, options)
        changed = {tenant: after} if after else {}
        write(file, msgspec.structs.replace(content, tenants=others | changed))
    typer.echo(f"{tenant}: {_as_options(after) if after else f'the limits of {ANY}'}")
    if tenant != ANY and all(key.tenant != tenant for key in content.keys):
        typer.echo(f"no key belongs to {tenant} yet; kvroute keys list shows the tenants with keys")


@keys.command(cls=HelpfulCommand)
def revoke(
    id: Annotated[  # noqa: A002
        str,
        typer.Argument(
            metavar="ID", help="The key's id, which is also the second part of the key."
        ),
    ],
    file: File,
) -> None:
    """Remove a key."""
    with _usable(file), locked(file):
        content = read(file)
        others = tuple(key for key in content.keys if key.id != id)
        if len(others) == len(content.keys):
            fail(f"ID is {id[:80]!r}, which {file} does not contain; see kvroute keys list")
        write(file, msgspec.structs.replace(content, keys=others))


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Print an error and end the command if the file cannot be used."""
    try:
        yield
    except (KeyFileError, PermissionError) as error:
        remedy = "" if path.exists() else "; kvroute keys add makes a file, in a folder that exists"
        fail(f"--file {path}: {error}{remedy}")


def _priority(name: str) -> Priority:
    return parse_priority(name) or fail(
        f"--priority is {name[:80]!r}; expected {', '.join(PRIORITIES)}"
    )


def _roles(names: list[str]) -> list[Role]:
    for name in names:
        if name not in ROLES:
            fail(f"--role is {name[:80]!r}; expected {', '.join(ROLES)}")
    return [role for role in ROLES if role in names]


def _check_tenant(name: str) -> None:
    """End the command with an error if a tenant cannot have this name."""
    if name != ANY and not re.match(TENANT, name):
        fail(f"TENANT is {name[:80]!r}; expected a tenant's name, or '{ANY}' for all others")


def _updated(before: TenantLimits, options: Mapping[str, Any]) -> TenantLimits:
    """Return the limits, changed by the options that the user has set (those that are not None)."""
    values = {name: _value(name, text) for name, text in options.items() if text is not None}
    if not values:
        fail(f"no limit is set; set one of {', '.join(NAMES.values())}")
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, TenantLimits)
        except msgspec.ValidationError as error:
            fail(f"{NAMES[name]} is {_text(options[name])[:80]!r}; {_expected(error)}")
    return msgspec.convert(msgspec.structs.asdict(before) | values, TenantLimits)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _expected(error: msgspec.ValidationError) -> str:
    """Reword msgspec's message, such as to `expected a whole number of at least 1`."""
    expected = str(error).partition(" - at ")[0]
    for original, wording in WORDING.items():
        expected = expected.replace(original, wording)
    return expected


def _as_options(limits: TenantLimits) -> str:
    """Return the limits as they would be set on the command line."""
    fields = msgspec.structs.asdict(limits)
    options = [_option(name, value) for name, value in fields.items() if value is not None]
    return " ".join(options) or "no limits"


def _option(name: str, value: int | Sequence[str]) -> str:
    if isinstance(value, int):
        return f"{NAMES[name]} {value}"
    return " ".join(f"{NAMES[name]} {text}" for text in value) or f"{NAMES[name]} ''"


def _value(name: str, text: str | Sequence[str]) -> object:
    """Parse the value of an option, or the values of --adapter; None removes the limit."""
    if not isinstance(text, str):
        names = [adapter for adapter in text if adapter]
        return None if names == [NONE] else names
    if text == NONE:
        return None
    if not (text.isascii() and text.isdigit()):
        fail(f"{NAMES[name]} is {text[:80]!r}; expected a whole number, or {NONE}")
    return int(text)
