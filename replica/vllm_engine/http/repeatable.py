"""Makes the random ids and the times in a response the same on every replica.

Some routes repeat an id or a time in several events of a response. If another replica continues the
response, it must use the same values. For this, the names `uuid` and `time` in vLLM's modules are
bound to the objects of this module.
"""

import importlib
import time
import uuid
from typing import Any

from kvroute.replica.vllm_engine.http.run import CURRENT

# vLLM's module -> the names that are replaced in it.
REPLACED = {
    "vllm.utils": ("uuid",),
    "vllm.entrypoints.generate.base.serving": ("time",),
    "vllm.entrypoints.openai.chat_completion.protocol": ("time",),
    "vllm.entrypoints.openai.chat_completion.serving": ("time",),
    "vllm.entrypoints.openai.completion.protocol": ("time",),
    "vllm.entrypoints.openai.completion.serving": ("time",),
    "vllm.entrypoints.openai.responses.protocol": ("time",),
    "vllm.entrypoints.openai.responses.serving": ("time",),
    "vllm.entrypoints.anthropic.protocol": ("time",),
    "vllm.entrypoints.anthropic.serving": ("time", "uuid"),
}


class _Uuid:
    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)

    @staticmethod
    def uuid4() -> uuid.UUID:
        run = CURRENT.get()
        return uuid.UUID(int=run.random.getrandbits(128), version=4) if run else uuid.uuid4()


class _Time:
    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> float:
        run = CURRENT.get()
        return run.call.created if run else time.time()


def install() -> None:
    """Replace the names in vLLM's modules. Call this once in each process."""
    ours = {"time": _Time(), "uuid": _Uuid()}
    for name, attributes in REPLACED.items():
        module = importlib.import_module(name)
        for attribute in attributes:
            setattr(module, attribute, ours[attribute])
