"""The file of API keys, and whose key a text is."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.features.gate import ROLES, Caller, Role
from kvroute.features.keys import key_gate
from kvroute.features.keys.key_file import (
    KeyFile,
    KeyFileError,
    Keyring,
    check_keys,
    new_file,
    new_key,
    read,
    write,
)
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.limits import ANY, TenantLimits
from kvroute.machine.problem import StartError
from tests.support.waiting import until

SALTS = st.text(max_size=8)


def made(*tenants: str, roles: tuple[Role, ...] = ("use",)) -> tuple[list[str], KeyFile]:
    """A key for each, and the file that has them."""
    pairs = [new_key(tenant, roles, "2026-11-23") for tenant in tenants]
    entries = tuple(entry for _, entry in pairs)
    return [key for key, _ in pairs], msgspec.structs.replace(new_file(), keys=entries)


def test_a_key_is_its_tenants(tmp_path: Path) -> None:
    (a, b), file = made("acme", "b-2", roles=("use", "observe"))
    write(tmp_path / "keys.json", file)
    keyring = Keyring(read(tmp_path / "keys.json"))
    found = keyring.caller(a)
    assert found
    assert (found.tenant, found.roles) == ("acme", frozenset({"use", "observe"}))
    other = keyring.caller(b)
    assert other
    assert found.salt != other.salt


def test_the_file_has_no_secret_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    (key,), file = made("acme")
    path = tmp_path / "keys.json"
    write(path, file)
    secret = key.split("-", 2)[2]
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


def test_another_salt_and_hash_for_each_key() -> None:
    _, file = made("a", "a", "a")
    assert len({key.salt for key in file.keys}) == len({key.hash for key in file.keys}) == 3


@given(st.text(max_size=100))
def test_an_invalid_key_identifies_no_caller(text: str) -> None:
    (key,), file = made("acme")
    keyring = Keyring(file)
    assert keyring.caller(text) is None
    assert keyring.caller(f"kvr-{text}") is None
    assert keyring.caller(key + text) is None or not text
    assert keyring.caller(text + key) is None or not text


@given(st.integers(0, 200), st.characters())
def test_a_changed_key_is_nobodys(at: int, character: str) -> None:
    (key,), file = made("acme")
    at %= len(key)
    changed = key[:at] + character + key[at + 1 :]
    assert changed == key or Keyring(file).caller(changed) is None


@given(st.tuples(SALTS, SALTS), st.tuples(SALTS, SALTS))
def test_no_two_tenants_have_an_equal_salt(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Whatever salts of their own they take."""
    _, file = made("a", "b")
    a, b = Keyring(file)._callers.values()
    assert a.salted(one[0]) != b.salted(one[1])
    assert (a.salted(one[0]) == a.salted(other[0])) == (one[0] == other[0])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a file of API keys"),
        (b"\xff\xfe", "not a file of API keys"),
        (b"[]", "not a file of API keys"),
        (b'{"secret": "YQ=="}', "secret"),
        (b'{"secret": "%s", "version": 2}' % (b"A" * 43 + b"="), "version 2"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=why):
        read(path)


def test_a_file_with_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    _, file = made("a")
    write(tmp_path / "keys.json", msgspec.structs.replace(file, keys=file.keys * 2))
    with pytest.raises(KeyFileError, match="two keys with the same id"):
        read(tmp_path / "keys.json")


def test_a_cluster_does_not_start_without_a_key_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(StartError, match=r"--api-keys: .* No such file"):
        check_keys(path)
    write(path, new_file())
    with pytest.raises(StartError, match="has no key; add one"):
        check_keys(path)


def test_a_missing_file_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file"):
        read(tmp_path / "keys.json")
    with pytest.raises(KeyFileError, match="cannot be written"):
        write(tmp_path / "folder" / "keys.json", new_file())


async def test_changes_of_the_file_are_read_and_invalid_files_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_gate, "POLL_S", 0.01)
    path = tmp_path / "keys.json"
    (a, b), file = made("a", "b")
    write(path, file)
    keys = KeyGate(path)
    keys.start()
    try:
        path.write_text("rubbish")
        await until(lambda: keys.problem)
        assert keys.keyring.caller(a)
        write(path, msgspec.structs.replace(file, keys=file.keys[1:]))
        await until(lambda: keys.keyring.caller(a) is None)
        assert keys.keyring.caller(b)
        await until(lambda: not keys.problem)
        path.unlink()
        await until(lambda: keys.problem)
        assert keys.keyring.caller(b)
        keys.check()
    finally:
        keys.close()


def test_the_command_adds_lists_and_revokes(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.json", CliRunner()

    def kvroute(*args: str) -> str:
        return runner.invoke(app, ["keys", *args, "--file", str(path)]).output

    used = kvroute("add", "--tenant", "acme").strip()
    managed = kvroute("add", "--tenant", "ops", "--role", "manage", "--role", "observe").strip()
    callers = [Keyring(read(path)).caller(key) for key in (used, managed)]
    assert [(caller and caller.tenant, caller and caller.roles) for caller in callers] == [
        ("acme", frozenset({"use"})),
        ("ops", frozenset({"observe", "manage"})),
    ]
    shown = kvroute("list")
    assert all(each.split("-")[1] in shown for each in (used, managed))
    assert used not in shown
    kvroute("revoke", used.split("-")[1])
    assert Keyring(read(path)).caller(used) is None
    assert Keyring(read(path)).caller(managed)


def test_a_key_can_be_less_urgent_than_others(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.json", CliRunner()
    given = ["keys", "add", "--tenant", "acme", "--file", str(path)]
    plain = runner.invoke(app, given).output.strip()
    slow = runner.invoke(app, [*given, "--priority", "batch"]).output.strip()
    callers = [Keyring(read(path)).caller(key) for key in (plain, slow)]
    assert [caller and caller.priority for caller in callers] == ["default", "batch"]
    assert "batch" in runner.invoke(app, ["keys", "list", "--file", str(path)]).output


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("add", "--tenant", "a b"), "--tenant is 'a b'"),
        (("add", "--tenant", "a", "--priority", "high"), "--priority is 'high'; expected inter"),
        (("add", "--tenant", "other"), "--tenant is 'other', a name that accounts and metrics use"),
        (("add", "--tenant", "a", "--role", "root"), "--role is 'root'; expected use"),
        (("revoke", "0"), "ID is '0', which "),
        (("limit", "a b", "--max-requests", "1"), "TENANT is 'a b'; expected a tenant's name"),
        (("limit", "a", "--max-requests", "x"), "--max-requests is 'x'; expected a whole number"),
        (
            ("limit", "a", "--max-requests", "0"),
            "--max-requests is '0'; expected a whole number of at least 1",
        ),
        (("limit", "a"), "no limit is set; set one of --max-requests"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, args: tuple[str, ...], why: str) -> None:
    write(tmp_path / "keys.json", new_file())
    found = CliRunner().invoke(app, ["keys", *args, "--file", str(tmp_path / "keys.json")])
    assert found.exit_code == 1
    assert why in found.output.replace("\n", " ")


def test_the_roles_are_use_observe_and_manage() -> None:
    assert ROLES == ("use", "observe", "manage")
    assert Caller("a", frozenset(), "s").salted("") == "s"


def test_a_tenant_has_its_own_limits_or_those_of_all_others(tmp_path: Path) -> None:
    _, file = made("acme", "b")
    limits = {"acme": TenantLimits(max_requests=4), ANY: TenantLimits(max_prefixes=0)}
    path = tmp_path / "keys.json"
    write(path, msgspec.structs.replace(file, tenants=limits))
    keyring = Keyring(read(path))
    assert [keyring.limits(tenant) for tenant in ("acme", "b", "no-key")] == [
        TenantLimits(max_requests=4),
        TenantLimits(max_prefixes=0),
        TenantLimits(),
    ]


def test_a_file_from_before_limits_has_none(tmp_path: Path) -> None:
    _, file = made("acme")
    fields = msgspec.to_builtins(file)
    del fields["tenants"]
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode(fields))
    assert Keyring(read(tmp_path / "keys.json")).limits("acme") == TenantLimits()


@pytest.mark.parametrize(
    "tenants",
    [{"acme": {"max_request": 4}}, {"acme": {"max_requests": 0}}, {"a b": {}}, {"**": {}}],
)
def test_limits_that_would_limit_nothing_are_refused(tmp_path: Path, tenants: object) -> None:
    _, file = made("acme")
    fields = msgspec.to_builtins(file) | {"tenants": tenants}
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode(fields))
    with pytest.raises(KeyFileError, match="not a file of API keys"):
        read(tmp_path / "keys.json")


def test_the_command_sets_limits_and_takes_them_away(tmp_path: Path) -> None:
    path, runner = tmp_path / "keys.json", CliRunner()

    def kvroute(*args: str) -> str:
        return runner.invoke(app, ["keys", *args, "--file", str(path)]).output

    kvroute("add", "--tenant", "acme")
    assert "no key belongs to acne yet" in kvroute("limit", "acne", "--max-requests", "4")
    kvroute("limit", "acne", "--like-others")
    assert "no key" not in kvroute("limit", "acme", "--max-requests", "3")
    kvroute("limit", "acme", "--max-requests", "4", "--adapter", "x", "--adapter", "y")
    kvroute("limit", "acme", "--uncached-tokens-per-minute", "600")
    kvroute("limit", "*", "--max-prefixes", "0")
    assert read(path).tenants == {
        "acme": TenantLimits(max_requests=4, uncached_tokens_per_minute=600, adapters=("x", "y")),
        ANY: TenantLimits(max_prefixes=0),
    }
    assert "acme: --max-requests 4 --uncached-tokens-per-minute 600 --adapter x" in kvroute("list")
    kvroute("limit", "acme", "--max-requests", "none", "--adapter", "")
    assert read(path).tenants["acme"] == TenantLimits(uncached_tokens_per_minute=600, adapters=())
    kvroute("limit", "acme", "--uncached-tokens-per-minute", "none", "--adapter", "none")
    assert Keyring(read(path)).limits("acme") == TenantLimits()  # whatever all others have
    assert "acme: the limits of *" in kvroute("limit", "acme", "--like-others")
    assert Keyring(read(path)).limits("acme") == TenantLimits(max_prefixes=0)
    assert "acme: --max-requests 2" in kvroute("limit", "acme", "--max-requests", "2")
