"""The modules that the fork server imports, without garbage collection.

Garbage collections would take a quarter of the time of the imports. In each forked process, later
collections would copy the memory pages of all objects that they visit; freezing prevents that.
"""

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
