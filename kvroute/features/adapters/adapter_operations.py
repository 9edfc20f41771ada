"""Adds, lists and removes LoRA adapters for the whole fleet, as operators ask."""

import asyncio
import random
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvroute.blocks.variants import NAME
from kvroute.contract.adapters import Adapter
from kvroute.features.adapters import TENANT_ADAPTERS_EXCEEDED, TOO_MANY_ADAPTERS
from kvroute.features.adapters.adapter_directory import AdapterDirectory
from kvroute.features.adapters.adapter_files import path_in
from kvroute.features.adapters.adapter_store import NameTakenError
from kvroute.features.adapters.added import (
    MAX_PATH,
    AdapterFiles,
    AddedAdapter,
    decode_files,
    encode_order,
    own_name,
    takes_added,
)
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown
from kvroute.router.dispatch.questions import Questions
from kvroute.router.placement.replicas import ReplicaRegistry
from kvroute.settings.router import RouterSettings
from kvroute.wording import plural

MAX_ADAPTERS = 10_000  # adapters of one model; each takes about 1 KB in Redis and in each router
CHECK_S = 300.0  # seconds that a replica has to load an adapter
REMOVAL_S = 50.0  # seconds that a client waits for the removal of an adapter
RECORDS_S = 5.0  # seconds that a client waits until the router knows a replica
POLL_S = 0.1  # seconds between two checks of what a client waits for


class NewAdapter(BaseModel):
    """The body of /v1/load_lora_adapter: vLLM's fields, and kvroute's."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(max_length=MAX_PATH)
    lora_path: str = Field(max_length=MAX_PATH)
    load_inplace: bool = False  # replace an adapter with this name
    is_3d_lora_weight: bool = False
    model: str | None = None  # the model that the adapter belongs to
    tenant: str = Field("", max_length=256)  # only this tenant can use it; empty: all can
    warm: bool = False  # whether replicas load it now


class OldAdapter(BaseModel):
    """The body of /v1/unload_lora_adapter: vLLM's fields, and kvroute's."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(max_length=MAX_PATH)
    lora_int_id: int | None = None  # ignored, as by vLLM
    model: str | None = None
    tenant: str = Field("", max_length=256)


class AdapterOperations:
    """The added adapters of one model, for operators."""

    def __init__(
        self,
        directory: AdapterDirectory,
        questions: Questions,
        replicas: ReplicaRegistry,
        settings: RouterSettings,
    ) -> None:
        self._directory = directory
        self._questions = questions
        self._replicas = replicas
        self._settings = settings

    async def add(
        self, new: NewAdapter, *, taken: Collection[str], limits: Mapping[str, int]
    ) -> None:
        """Check an adapter by loading it on one replica, and add it for the fleet.

        Args:
            new: the adapter.
            taken: names of models and of the adapters of --lora.
            limits: the limits of the adapter's tenant, by name.

        Raises:
            ApiError: the adapter cannot be added.
        """
        path = self._checked(new, taken)
        with needing_redis():
            await self._directory.refresh()
        await self._wait_for_replicas()
        self._check_room(new, limits)
        order = encode_order(Adapter(name=new.lora_name, path=path))
        packed = await self._questions.ask(
            "check_adapter", order, within_s=CHECK_S, prefer=self._with_room
        )
        files = decode_files(packed)
        if files.problem:
            raise invalid("lora_path", f"lora_path is {shown(new.lora_path)}: {files.problem}")
        await self._register(_adapter(new, path, files), replaces=new.load_inplace)

    async def remove(self, old: OldAdapter) -> bool:
        """Remove an adapter, and wait until its requests have ended and it is gone.

        Returns:
            Whether it is gone. If not, it goes as soon as its requests have ended.

        Raises:
            ApiError: there is no such adapter.
        """
        name, own = old.lora_name, own_name(old.tenant, old.lora_name)
        with needing_redis():
            await self._directory.refresh()
            keys = [adapter.key for adapter in self._directory.all if adapter.id == own]
            left = [await self._directory.store.leave(key) for key in keys]
            if not any(left):
                owner = f" of the tenant {shown(old.tenant)}" if old.tenant else ""
                raise ApiError(
                    404,
                    f"The lora adapter '{name[:80]}'{owner} cannot be found; kvroute adapters list "
                    "shows the adapters that were added",
                    param="lora_name",
                    code="model_not_found",
                )
            await self._directory.refresh()
        ends_s = time.monotonic() + REMOVAL_S
        while any(map(self._directory.get, keys)) and time.monotonic() < ends_s:
            await asyncio.sleep(POLL_S)
        return not any(map(self._directory.get, keys))

    async def list(self) -> list[dict[str, Any]]:
        """Return all added adapters, with the replicas that have them in memory.

        Without Redis, these are the adapters that were read last.
        """
        if self._settings.lora_root:
            await self._directory.refresh_if_possible()
        loaded: dict[str, list[str]] = {}
        records = self._replicas.own_records
        for record in records:
            for key in record.load.variants:
                loaded.setdefault(key, []).append(record.id)
        return [
            {
                "name": adapter.name,
                "path": adapter.path,
                "digest": adapter.digest,
                "rank": adapter.rank,
                "tenant": adapter.tenant or None,
                "created": int(adapter.created_s),
                "warm": adapter.is_warm,
                "state": "leaving" if adapter.is_leaving else "ready",
                "loaded_on": loaded.get(adapter.key, []),
                "replicas": len(records),
            }
            for adapter in self._directory.all
        ]

    def _checked(self, new: NewAdapter, taken: Collection[str]) -> str:
        """Return the absolute path of a new adapter.

        Raises:
            ApiError: adapters cannot be added here, or the name or the path is not allowed.
        """
        root = self._settings.lora_root
        if root is None:
            raise _cannot_add()
        if not re.fullmatch(NAME, new.lora_name):
            raise invalid(
                "lora_name",
                f"lora_name is {shown(new.lora_name)}; expected 1 to 128 letters, digits and the "
                "characters . _ / -, beginning with a letter or a digit",
            )
        if new.lora_name in taken:
            raise invalid(
                "lora_name",
                f"lora_name is {shown(new.lora_name)}, which is a model or an adapter of --lora; "
                "choose another name",
            )
        if new.is_3d_lora_weight:
            raise invalid("is_3d_lora_weight", "is_3d_lora_weight is true, which is not supported")
        try:
            return path_in(root, new.lora_path)
        except ValueError as error:
            raise invalid("lora_path", f"lora_path is {shown(new.lora_path)}; {error}") from None

    async def _wait_for_replicas(self) -> None:
        """Wait a moment for the first record of a replica, since a cluster may just have begun."""
        ends_s = time.monotonic() + RECORDS_S
        while not self._replicas.own_records and time.monotonic() < ends_s:
            await asyncio.sleep(POLL_S)

    def _check_room(self, new: NewAdapter, limits: Mapping[str, int]) -> None:
        """Refuse an adapter early, before a replica loads it."""
        if not any(map(takes_added, self._replicas.own_records)):
            raise ApiError(
                503,
                "no replica can load adapters: none is ready yet, or their vLLM does not fit "
                "kvroute; kvroute doctor says why. Try again later",
            )
        found = self._directory.find(new.lora_name, new.tenant)
        if found and found.tenant == new.tenant and not new.load_inplace:
            raise _taken(found)
        self._check_limit(new, limits.get("max_adapters"))
        if len(self._directory.all) >= MAX_ADAPTERS:
            raise ApiError(
                409,
                f"the model has {MAX_ADAPTERS:,} added adapters, which is the maximum; remove some "
                "that are not needed",
                code=TOO_MANY_ADAPTERS,
            )

    def _check_limit(self, new: NewAdapter, limit: int | None) -> None:
        """Refuse an adapter above the limit of its tenant."""
        own = {each.name for each in self._directory.all if each.tenant == new.tenant}
        if limit is not None and len(own | {new.lora_name}) > limit:
            raise ApiError(
                409,
                f"tenant {new.tenant} may have {plural(limit, 'adapter')}, and {new.lora_name!r} "
                f"would be number {len(own) + 1}; remove one with kvroute adapters remove",
                param="tenant",
                code=TENANT_ADAPTERS_EXCEEDED,
            )

    def _with_room(self, running: Collection[str]) -> str:
        """Return the replica that has the most free places for adapters in memory."""

        def places(replica_id: str) -> tuple[int, float]:
            record = self._replicas.get(replica_id)
            if record is None or not takes_added(record):
                return -1, 0.0
            return record.facts.max_variants - len(record.load.variants), random.random()

        return max(running, key=places)

    async def _register(self, adapter: AddedAdapter, *, replaces: bool) -> None:
        with needing_redis():
            try:
                await self._directory.store.add(adapter, replaces=replaces)
            except NameTakenError as error:
                raise _taken(error.by) from None
            await self._directory.refresh()


def _cannot_add() -> ApiError:
    """Return the error for a cluster without --lora-root."""
    return ApiError(
        400,
        "no adapters can be added to this cluster; start it with --lora-root FOLDER, where FOLDER "
        "has all adapters, or name the adapters with --lora NAME=PATH",
        code="unsupported_parameter",
    )


def _adapter(new: NewAdapter, path: str, files: AdapterFiles) -> AddedAdapter:
    return AddedAdapter(
        name=new.lora_name,
        path=path,
        digest=files.digest,
        rank=files.rank,
        tenant=new.tenant,
        created_s=time.time(),
        is_warm=new.warm,
    )


def _taken(by: AddedAdapter) -> ApiError:
    """Return the error for a name that another adapter has, in vLLM's words."""
    message = f"The lora adapter '{by.name}' has already been loaded."
    if by.is_leaving:
        message = (
            f"The lora adapter '{by.name}' with these files is still being removed; try again when "
            "its requests have ended."
        )
    else:
        message += " To replace it, send load_inplace: true, or use kvroute adapters add --replace."
    return ApiError(400, message, param="lora_name", code="invalid_value")
