"""The options that name prefixes to declare at the start: `[{"task_id": 1, "prompt": "..."}]`.

The format is that of RTP-LLM, another inference engine.
"""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvroute.features.prefixes import GROUP
from kvroute.features.prefixes.prefix_id import PrefixId
from kvroute.settings import parsers
from kvroute.settings.help import Option, SettingsError

MAX_TASKS = 100  # maximum number of named prefixes in one file or text
FORMAT = 'expected a list such as [{"task_id": 1, "prompt": "You are ..."}]'


class PrefixOptions(BaseModel):
    """The options of named prefixes."""

    multi_task_prompt: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            GROUP,
            'File of named prefixes to declare at the start: [{"task_id": 1, "prompt": "..."}, '
            "...].",
            example="tasks.json",
            default="none",
            env=("MULTI_TASK_PROMPT",),
        ),
    ] = None
    multi_task_prompt_str: Annotated[
        str | None,
        Option(
            GROUP,
            "Named prefixes to declare at the start, as JSON.",
            example='[{"task_id": 1, "prompt": "You are ..."}]',
            default="none",
            env=("MULTI_TASK_PROMPT_STR",),
        ),
    ] = None


class Task(BaseModel):
    """A named prefix with RTP-LLM's field names; other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    task_id: PrefixId
    prompt: Annotated[str, Field(min_length=1)]


class PrefixSettings(BaseModel):
    """What routers get."""

    tasks: tuple[Task, ...] = ()  # the prefixes to declare at the start


class ReplicaPrefixSettings(BaseModel):
    """What replicas get."""

    declared: tuple[str, ...] = ()  # ids of the prefixes that are declared at the start


_TASKS: TypeAdapter[list[Task]] = TypeAdapter(Annotated[list[Task], Field(max_length=MAX_TASKS)])


def read_tasks(text: str | bytes) -> tuple[Task, ...]:
    """Return the tasks in order. Raises ValueError with the problem and the expected format."""
    try:
        tasks = _TASKS.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{FORMAT}; {location or 'the value'}: {first['msg']}") from None
    seen = set[str]()
    for task in tasks:
        if task.task_id in seen:
            raise ValueError(f"{FORMAT}; two tasks have the task_id {task.task_id!r}")
        seen.add(task.task_id)
    return tuple(tasks)


def tasks_of(options: PrefixOptions) -> tuple[Task, ...]:
    """Return the prefixes that the options name.

    Raises:
        SettingsError: the options contradict each other, or name a file that cannot be used.
    """
    file, text = options.multi_task_prompt, options.multi_task_prompt_str
    if file and text:
        raise SettingsError(
            f"--multi-task-prompt is {str(file)!r}, and --multi-task-prompt-str is set as well "
            "(perhaps by the variable MULTI_TASK_PROMPT or MULTI_TASK_PROMPT_STR); keep one of them"
        )
    try:
        return read_tasks(file.read_bytes() if file else text or "[]")
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror}); give a readable file"
    except ValueError as error:
        reason = str(error)
    source = f"--multi-task-prompt is {str(file)!r}" if file else "--multi-task-prompt-str"
    raise SettingsError(f"{source}: {reason}")
