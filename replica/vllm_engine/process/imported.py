"""What the fork server imports. The collector would look for garbage all the while, a quarter of
the time, and later copy into each forked process what it looks at."""

import gc
import importlib

gc.disable()
for name in (
    "kvroute.replica.vllm_engine.core.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(name)
gc.freeze()
