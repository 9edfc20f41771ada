"""Images are processed once; one that cannot be loaded is the client's error.

vLLM would answer with an error of the server to hosts that do not answer, to local files and to
images of too many pixels, for example; a router would then ask the next replica for the same.
"""

from typing import Any

from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

REPLACED = "http"  # vLLM's name of its own; others can be chosen with VLLM_MEDIA_CONNECTOR


class Connector(MediaConnector):
    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (ValueError, VLLMClientError):
            raise
        except Exception as error:  # whatever downloads and decoders raise
            words = f"{type(error).__name__}: {error}"
            raise VLLMUnprocessableEntityError(f"Failed to load {url[:60]}: {words}") from error


def process_once(renderer: Any) -> None:
    """For a router that asks how a prompt is rendered, and for the engine that gets it.

    vLLM keeps processed images for those who only ask. Of others it remembers what the engine has,
    and sends no image twice; so the engine would miss one that a client has not waited for. Here
    the engine gets each image with each request, and keeps none (core/scheduler.py).
    """
    renderer._mm_processor_cache = renderer._mm_processor_only_cache


def install() -> None:
    """Once for each process."""
    MEDIA_CONNECTOR_REGISTRY.register(REPLACED)(Connector)
