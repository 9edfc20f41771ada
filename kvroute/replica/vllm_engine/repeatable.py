"""What vLLM's handlers draw at random and date is the same for one request on every replica.

Some routes repeat ids and dates in several events; a replica that goes on must use the same ones.
The handlers' modules name `uuid` and `time`; here these names get other objects.
"""

import importlib
import time
import uuid
from typing import Any

from kvroute.replica.vllm_engine.http_run import CURRENT

# vLLM's modules whose `time` and `uuid` are replaced where they have them.
MODULES = (
    "vllm.utils",
    "vllm.entrypoints.generate.base.serving",
    *(
        f"vllm.entrypoints.{route}.{part}"
        for route in (
            "openai.chat_completion",
            "openai.completion",
            "openai.responses",
            "anthropic",
        )
        for part in ("protocol", "serving")
    ),
)


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
    """Once for each process."""
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if hasattr(module, "time"):
            module.time = _Time()
        if hasattr(module, "uuid"):
            module.uuid = _Uuid()
