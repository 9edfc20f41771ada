"""The Files API and the Batch API: clients upload lines, and get their answers as files later.

Every router has a service that sends the lines to the router's own application, as a client would
(service.py). README.md explains the parts. `kvroute batch run` only uses the cluster as a client,
so it is not a part of this feature.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.doctor.checks import Check
    from kvroute.features.feature import CheckOptions
    from kvroute.features.router_service import RouterService
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need


class Batching(Feature):
    """Files, and batches of requests that run inside the cluster."""

    name = "batches"
    paths = Paths(use=("/v1/files", "/v1/batches"), forms=("/v1/files",))

    def options(self) -> "type[BaseModel]":
        from kvroute.features.batches.batch_options import BatchOptions

        return BatchOptions

    def needs(self) -> "Sequence[Need]":
        from kvroute.settings.needs import Need

        return [
            Need(
                ("max_file_mb", "files_quota_mb"),
                lambda options: options.files_dir != "off",
                "files: set --files-dir to a folder",
            )
        ]

    def before_start(self) -> "Mapping[str, CheckOptions]":
        from kvroute.features.batches.batch_options import check_files_dir

        return {"files": lambda settings: check_files_dir(settings.files_dir)}

    def service(self, base: "RouterBase") -> "RouterService | None":
        from kvroute.features.batches.service import batch_service

        return batch_service(base)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.batches import batch_routes, file_routes

        return [file_routes.routes, batch_routes.routes]

    def commands(self) -> "Mapping[str, typer.Typer]":
        from kvroute.features.batches.batch_commands import commands

        return {"batch": commands}

    def checks(self, found: Mapping[str, Any] | None) -> "Iterator[Check]":
        from kvroute.features.batches.batch_checks import batches

        return batches(found)
