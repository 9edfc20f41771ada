"""Checks the API key of each request: it must have a role that the route accepts.

The file of keys is read again whenever it changes. If it becomes unusable, the keys that were read
last stay valid.

The rejection of a wrong key is delayed. For further wrong keys of the same address, the delay is
each time twice as long, up to LONGEST_WAIT_S. While WAITING rejections are being delayed, others
are sent at once. Requests with a valid key are never delayed.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from starlette.types import Scope

from kvroute.contract.priority import Priority
from kvroute.features.gate import Caller, Entry, Gate, Role
from kvroute.features.keys.accounting.lasting_accounts import LastingAccounts
from kvroute.features.keys.key_file import KeyFileError, Keyring, read
from kvroute.features.keys.router_limits import Limits
from kvroute.router.api.errors import ApiError

log = logging.getLogger("kvroute.keys")

POLL_S = 1.0  # seconds between two checks of the file

# Headers with an API key, in the order in which they are tried: those of OpenAI's, Anthropic's and
# Azure's clients. A proxy may have set one of them for itself.
KEY_HEADERS = ("authorization", "x-api-key", "api-key")
FIRST_WAIT_S = 0.05  # delay of an address's first rejection; each further delay is twice as long
LONGEST_WAIT_S = 2.0  # the longest delay
FORGOTTEN_S = 60.0  # an address without a wrong key for this long starts again at the first delay
ADDRESSES = 4096  # the most addresses whose wrong keys are counted
WAITING = 256  # rejections that may be delayed at the same time; others are sent at once


class KeyGate(Gate):
    """The API keys and the limits of tenants in one router, for all its models."""

    name = "keys"
    is_open = False

    def __init__(self, path: Path) -> None:
        """Read the file of keys. Raises KeyFileError."""
        self._path = path
        self._state = _state(path)
        self.keyring = Keyring(read(path))
        self._failures = Failures()
        # The usage of tenants with limits.
        self.counts = Limits(lambda tenant: self.keyring.limits(tenant))
        self.accounts = dict[str, LastingAccounts]()  # name of a model -> what tenants used of it

    # The gate.

    async def caller(self, scope: Scope, roles: Sequence[Role]) -> Caller:
        keys = _keys_in(scope["headers"])
        callers = {name: self.keyring.caller(key) for name, key in keys.items()}
        known = [(name, caller) for name, caller in callers.items() if caller is not None]
        if not known:
            if keys:
                await self._failures.slow_down(_address(scope))
            problem = "there is no API key"
            if keys:
                problem = f"the API key in {' and in '.join(keys)} is unknown or revoked"
            raise ApiError(
                401,
                f"{problem}; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        fitting = (each for each in known if not each[1].roles.isdisjoint(roles))
        name, caller = next(fitting, known[0])
        if caller.roles.isdisjoint(roles):
            raise ApiError(
                403,
                f"{scope['method']} {scope['path'][:80]} needs an API key with the role "
                f"{roles[0]}; the one in {name} has {' and '.join(sorted(caller.roles))}",
                code="insufficient_role",
            )
        return caller

    def enter(self, caller: Caller, now_s: float) -> Entry:
        return self.counts.enter(caller.tenant, now_s) or Entry(caller.tenant)

    def sender(self, tenant: str, priority: Priority) -> Caller | None:
        return self.keyring.tenant(tenant, priority)

    def limits(self, tenant: str) -> Mapping[str, int]:
        return self.keyring.limits(tenant).by_name

    # The service.

    def start(self) -> None:
        self.running = [asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        await asyncio.gather(*(accounts.close() for accounts in self.accounts.values()))

    def close(self) -> None:
        for task in self.running:
            task.cancel()

    async def _watch(self) -> None:
        """Read the file again whenever it changes, until cancelled.

        The checks run in their own thread. So a disk that hangs blocks no other task, and no other
        task delays the checks.
        """
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="keys")
        try:
            while True:
                await asyncio.sleep(POLL_S)
                await loop.run_in_executor(thread, self._read_if_changed)
        finally:
            thread.shutdown(wait=False)

    def _read_if_changed(self) -> None:
        try:
            state = _state(self._path)
            if state == self._state and not self.problem:
                return
            self.keyring = Keyring(read(self._path))
        except KeyFileError as error:
            if str(error) != self.problem:
                log.error("the API keys were not updated; the earlier keys stay valid: %s", error)
            self.problem = str(error)
            return
        self._state, self.problem = state, ""
        log.info("the API keys were read from %s", self._path)


class Failures:
    """Counts wrong keys by address, and delays their rejections."""

    def __init__(self) -> None:
        # For each address: the number of wrong keys, and the time of the last one.
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._waiting = 0  # rejections that are being delayed

    async def slow_down(self, address: str) -> None:
        """Count a wrong key of this address, and wait for the delay of its rejection."""
        wait_s = self._wait_s(address, time.monotonic())
        if self._waiting >= WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._waiting -= 1

    def _wait_s(self, address: str, now_s: float) -> float:
        count, last_s = self._counts.pop(address, (0, now_s))
        count = 0 if now_s - last_s > FORGOTTEN_S else count
        self._counts[address] = count + 1, now_s
        if len(self._counts) > ADDRESSES:
            self._counts.popitem(last=False)
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(count, 16)))


def _keys_in(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the API keys of a request by their headers, in the order in which they are tried."""
    found = dict[str, str]()
    for raw_name, value in headers:
        name = raw_name.decode("latin-1")
        if name == "authorization":
            value = value[7:] if value[:7].lower() == b"bearer " else b""
        if name in KEY_HEADERS and (key := value.strip()):
            found.setdefault(name, key.decode("latin-1"))
    return {name: found[name] for name in KEY_HEADERS if name in found}


def _address(scope: Scope) -> str:
    """Return the client's IP address; empty if it is unknown."""
    return str((scope.get("client") or ("",))[0])


def _state(path: Path) -> tuple[int, int, int]:
    """Return values that change whenever the file is written. Raises KeyFileError."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
