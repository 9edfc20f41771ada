"""The options of one model."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from kvroute.settings import parsers
from kvroute.settings.help import Option, option
from kvroute.settings.options.common import ADAPTERS, PREFIXES, WHOLE_CLUSTER, in_order
from kvroute.settings.options.deployment import DeploymentOptions
from kvroute.settings.options.features import FeatureOptions
from kvroute.settings.options.replica import ReplicaOptions
from kvroute.settings.options.router import RouterOptions


class ModelOptions(FeatureOptions, ReplicaOptions, RouterOptions, DeploymentOptions):
    """All options of one model: for its replicas, routers and features, and for Ray Serve."""

    multi_task_prompt: Annotated[
        Path | None,
        AfterValidator(parsers.absolute),
        Option(
            PREFIXES,
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
            PREFIXES,
            "Named prefixes to declare at the start, as JSON.",
            example='[{"task_id": 1, "prompt": "You are ..."}]',
            default="none",
            env=("MULTI_TASK_PROMPT_STR",),
        ),
    ] = None
    lora: Annotated[
        list[str],
        BeforeValidator(parsers.listed),
        AfterValidator(parsers.absolute_folders),
        Option(
            ADAPTERS,
            "Name and folder of an adapter. For several, repeat the option or separate them with "
            "commas.",
            example="sql=adapters/sql",
            default="none",
            flags=("--lora", "--lora-modules"),
        ),
    ] = []  # noqa: RUF012  # pydantic copies the default


PER_MODEL = tuple(  # names of the options that can have different values for each model
    name
    for name, field in in_order(ModelOptions.model_fields).items()
    if option(field).group not in WHOLE_CLUSTER
)
