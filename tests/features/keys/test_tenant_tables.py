"""Tables of tenants and keys at 80 columns: nothing is cut and no word is broken."""

from pathlib import Path

import pytest

from kvroute.features.keys.accounting import tenants_command
from kvroute.features.keys.accounting.accounts import as_json
from tests.support.narrow_terminal import NAMES, is_whole, shown


@pytest.mark.parametrize("name", NAMES)
def test_tenants(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    used = {"ok": 30_000_000, "hit": 15_000_000_000, "saved_us": 10**15}
    account = as_json(name, used) | {"model": "m"}
    usage = {"since": "2026-11-01", "until": "2026-11-23", "data": [account]}
    monkeypatch.setattr(tenants_command, "call", lambda *_, **__: usage)
    assert is_whole(shown("tenants", "--url", "http://x"), name, "15,000,000,000", "100.0%")


@pytest.mark.parametrize("name", NAMES)
def test_keys_list(tmp_path: Path, name: str) -> None:
    file, tenant = str(tmp_path / "keys.json"), name[:64]
    shown("keys", "add", "--tenant", tenant, "--file", file, "--role", "use", "--role", "manage")
    shown("keys", "limit", tenant, "--file", file, "--max-requests", "5")
    assert is_whole(shown("keys", "list", "--file", file), tenant, "manage", "default")
