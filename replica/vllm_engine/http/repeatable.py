"""Makes the random ids and the times in a response the same on every replica.

Some routes repeat an id or a time in several events of a response. If another replica continues the
response, it must use the same values. For this, the objects of this module
replace `uuid` and `time` in vLLM's modules.
"""

import time
import uuid
from typing import Any

from kvroute.replica.vllm_engine.http.request_run import CURRENT


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


TIME, UUID = _Time(), _Uuid()
