"""The settings that a router receives for one model at its start."""

from kvroute.settings.decided import Decided
from kvroute.settings.multi_task import Task
from kvroute.settings.options import RouterOptions


class RouterSettings(Decided, RouterOptions):
    tensor_parallel_size: int = 1  # GPUs of a rank; 1 on CPUs too
    tasks: tuple[Task, ...] = ()  # named prefixes to start with
