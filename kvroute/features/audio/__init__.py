"""Audio: transcriptions and translations of recordings.

README.md explains the parts. Sounds in the messages of chats are no part of this feature.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvroute.features.feature import Feature, FeatureSettings, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter
    from pydantic import BaseModel

    from kvroute.features.audio.recordings import Recordings
    from kvroute.features.audio.uploaded_bodies import UploadedBodies
    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.router.serving.router_base import RouterBase

ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
VLLM_LIMIT = "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"  # vLLM's own limit of a recording


class Audio(Feature):
    """The routes whose body is a form with a recording."""

    name = "audio"
    paths = Paths(use=ROUTES, forms=ROUTES, repeated=ROUTES)

    def options(self) -> "type[BaseModel]":
        from kvroute.features.audio.audio_options import AudioOptions

        return AudioOptions

    def settings(self, options: Any) -> FeatureSettings:
        values = {"max_audio_mb": options.max_audio_mb}
        return FeatureSettings(values, values, {VLLM_LIMIT: str(options.max_audio_mb)})

    def service(self, base: "RouterBase") -> "Recordings":
        from kvroute.features.audio.audio_options import AudioOptions
        from kvroute.features.audio.recordings import Recordings

        options = base.settings.of(self.name, AudioOptions)
        return Recordings(limit_mb=options.max_audio_mb)

    def replica(self, base: "ReplicaBase") -> "UploadedBodies":
        from kvroute.features.audio.audio_options import AudioOptions
        from kvroute.features.audio.uploaded_bodies import UploadedBodies

        options = base.settings.in_replica(self.name, AudioOptions)
        return UploadedBodies(limit_mb=options.max_audio_mb, refusal=base.refusal)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.audio.audio_routes import routes

        return [routes]
