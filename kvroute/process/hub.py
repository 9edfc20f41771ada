"""Checks whether a model can be loaded from Hugging Face's hub."""

import os
from pathlib import Path

from kvroute.contract.identity import cached_file

TIMEOUT_S = 10.0  # longest wait for the hub's answer


def check_on_hub(model: str) -> None:
    """Ask the hub for a model that is neither a folder nor in the hub's local cache.

    Engines would ask for minutes before they report that they cannot load it. A hub that answers
    with another error than "not found" is not reported, since engines ask it again.

    Raises:
        ValueError: the hub does not have the model, or cannot be reached.
    """
    if "://" in model or Path(model).expanduser().exists() or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    named = f"model is {model!r}, which is neither a folder nor in the hub's local cache"
    try:
        if cached_file(model, "config.json"):
            return
        HfApi().model_info(model, timeout=TIMEOUT_S)
    except RepositoryNotFoundError:
        raise ValueError(
            f"{named}, and {constants.ENDPOINT} has no such model that you may read; correct the "
            "name, or set HF_TOKEN if the model is private"
        ) from None
    except OfflineModeIsEnabled:
        raise ValueError(f"{named}, and HF_HUB_OFFLINE is set") from None
    except (HfHubHTTPError, HFValidationError):
        return
    except Exception as error:  # the errors of the hub's HTTP client have no narrower type
        raise ValueError(
            f"{named}, and {constants.ENDPOINT} cannot be reached ({error}); set HF_ENDPOINT to a "
            "mirror, or --model to a folder"
        ) from None
