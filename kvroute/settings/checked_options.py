"""A user's options for one model are checked, and the files that they name are read once."""

from functools import cached_property

from kvroute.contract.adapters import Adapter, read_adapter
from kvroute.settings import owned_engine_args
from kvroute.settings.help import SettingsError
from kvroute.settings.multi_task import Task, read_tasks
from kvroute.settings.options import ModelOptions


class CheckedOptions(ModelOptions):
    """Each property raises SettingsError when an option that it needs cannot be used."""

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model

    @property
    def most_replicas(self) -> int:
        """The maximum size of the fleet."""
        return self.max_replicas or self.replicas

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The named prefixes to start with."""
        file, text = self.multi_task_prompt, self.multi_task_prompt_str
        if file and text:
            raise SettingsError(
                f"--multi-task-prompt is {str(file)!r} and --multi-task-prompt-str is given too "
                "(MULTI_TASK_PROMPT, MULTI_TASK_PROMPT_STR); keep one of them"
            )
        try:
            return read_tasks(file.read_bytes() if file else text or "[]")
        except OSError as error:
            why = f"it cannot be read ({error.strerror}); name a file that can"
        except ValueError as error:
            why = str(error)
        given = f"--multi-task-prompt is {str(file)!r}" if file else "--multi-task-prompt-str"
        raise SettingsError(f"{given}: {why}")

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters."""
        adapters: dict[str, Adapter] = {}
        for given in self.lora:
            try:
                adapter = read_adapter(given)
            except ValueError as error:
                raise SettingsError(f"--lora is {given!r}: {error}") from None
            if adapter.name in (*adapters, self.name):
                raise SettingsError(
                    f"--lora is {given!r}, and the name {adapter.name!r} is taken; give it another"
                )
            adapters[adapter.name] = adapter
        return tuple(adapters.values())

    def check(self) -> None:
        """Raises SettingsError for values that contradict each other or name unusable files."""
        self._check_size()
        self._check_gpus()
        self._check_engine_args()
        _ = self.tasks, self.adapters

    def _check_size(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise SettingsError(
                f"--max-replicas is {self.max_replicas} and --replicas, the fewest, is "
                f"{self.replicas}; expected at least as many, such as {2 * self.replicas}"
            )

    def _check_gpus(self) -> None:
        gpus, ranks = self.gpus_per_replica or 0, self.data_parallel_size
        if gpus % ranks:
            raise SettingsError(
                f"--gpus-per-replica is {gpus} and --data-parallel-size is {ranks}; expected as "
                f"many GPUs for each rank, such as {ranks * max(1, gpus // ranks)}"
            )

    def _check_engine_args(self) -> None:
        if self.engine_args and self.engine == "simulated":
            raise SettingsError(
                f"--engine-args is {self.engine_args!r}, which only vLLM takes; leave it out, or "
                "say --engine vllm"
            )
        if refusal := owned_engine_args.refusal(self.engine_args):
            raise SettingsError(f"--engine-args: {refusal}")
