"""HTTP routes that add, list and remove LoRA adapters while the cluster runs, in vLLM's format."""

import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from kvroute.features.adapters.adapter_operations import NewAdapter, OldAdapter
from kvroute.features.adapters.router_adapters import RouterAdapters
from kvroute.features.gate import TENANT, Gate
from kvroute.router.api.bodies import BodyReader
from kvroute.router.api.errors import invalid, shown
from kvroute.router.serving.model_router import ModelRouter
from kvroute.router.serving.models import Served, label_by_model

routes = APIRouter()


@routes.post("/v1/load_lora_adapter")
async def load(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Add an adapter for the whole fleet. One replica loads it first, to check it."""
    new = await bodies.parsed(NewAdapter, request)
    _check_tenant(request, new.tenant)
    model = models.select(new.model)
    names = [
        name
        for each in models.all
        for name in (each.name, *(adapter.name for adapter in each.settings.adapters))
    ]
    for each in models.all:
        if each is not model and each.variant(new.lora_name, new.tenant):
            names.append(new.lora_name)
    gate: Gate = request.app.state.gate
    limits = gate.limits(new.tenant)
    await _adapters(model).operations.add(new, taken=names, limits=limits)
    return PlainTextResponse(f"Success: LoRA adapter '{new.lora_name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
async def unload(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Remove an adapter, and return when its requests have ended. 202: some still run."""
    old = await bodies.parsed(OldAdapter, request)
    if await _adapters(models.select(old.model)).operations.remove(old):
        return PlainTextResponse(f"Success: LoRA adapter '{old.lora_name}' removed successfully.")
    return PlainTextResponse(
        f"LoRA adapter '{old.lora_name}' gets no new requests; it is removed after the last one.",
        202,
    )


@routes.get("/v1/adapters")
async def list_adapters(models: Served, model: str | None = None) -> Response:
    """Return the added adapters of all tenants, and which replicas have them in memory."""
    selected = models.all if model is None else [models.select(model)]
    adapters = [await _adapters(each).operations.list() for each in selected]
    return JSONResponse({"object": "list", "data": label_by_model(selected, adapters)})


def _adapters(model: ModelRouter) -> RouterAdapters:
    return model.feature(RouterAdapters)


def _check_tenant(request: Request, tenant: str) -> None:
    """Refuse a tenant that no key can have.

    Raises:
        ApiError: the cluster has no API keys, or this is no name of a tenant.
    """
    if tenant and request.app.state.gate.is_open:
        raise invalid(
            "tenant",
            f"tenant is {shown(tenant)}, and this cluster has no API keys; leave tenant out, or "
            "start the cluster with --api-keys",
        )
    if tenant and not re.match(TENANT, tenant):
        raise invalid("tenant", f"tenant is {shown(tenant)}; expected the name of a tenant")
