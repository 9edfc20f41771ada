"""Processes each image once, and reports an image that cannot be loaded as the client's error.

For some images, vLLM itself would report an error of the server: for example if the image's host
does not respond, for local files, and for too many pixels. A router would then send the same
request to the next replica.
"""

from typing import Any

from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

# vLLM's name of the connector that is replaced; VLLM_MEDIA_CONNECTOR can select another one.
REPLACED = "http"


class MediaLoader(MediaConnector):
    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (ValueError, VLLMClientError):
            raise
        except Exception as error:  # downloads and decoders raise many kinds of exceptions
            reason = f"{type(error).__name__}: {error}"
            raise VLLMUnprocessableEntityError(f"Failed to load {url[:60]}: {reason}") from error


def process_once(renderer: Any) -> None:
    """Use one cache of processed images for render requests and for the engine's requests.

    vLLM has a cache of processed images for render requests only. For the engine's requests it
    remembers which images the engine has, and sends no image twice. But if a client leaves before
    its image is sent, the engine never gets that image. Here, the engine gets each image with each
    request, and caches none (core/scheduler.py).
    """
    renderer._mm_processor_cache = renderer._mm_processor_only_cache


def install() -> None:
    """Replace vLLM's connector; call this once in each process."""
    MEDIA_CONNECTOR_REGISTRY.register(REPLACED)(MediaLoader)
