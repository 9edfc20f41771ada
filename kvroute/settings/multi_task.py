"""Reads the named prefixes to declare at the start: `[{"task_id": 1, "prompt": "..."}]`.

A named prefix is a text that replicas keep cached for the prompts that begin with it. The format is
that of RTP-LLM, another inference engine.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvroute.contract.prefix_id import PrefixId

MAX_TASKS = 100  # maximum number of named prefixes in one file or text
FORMAT = 'expected a list such as [{"task_id": 1, "prompt": "You are ..."}]'


class Task(BaseModel):
    """A named prefix with RTP-LLM's field names; other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    task_id: PrefixId
    prompt: Annotated[str, Field(min_length=1)]


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
