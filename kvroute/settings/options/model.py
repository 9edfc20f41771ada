"""The options of one model."""

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, create_model

from kvroute.features import FEATURES
from kvroute.settings import parsers
from kvroute.settings.help import Option, option
from kvroute.settings.options.common import ADAPTERS, WHOLE_CLUSTER, in_order
from kvroute.settings.options.deployment import DeploymentOptions
from kvroute.settings.options.replica import ReplicaOptions
from kvroute.settings.options.router import RouterOptions

# Only the sides of a feature read its options, as an instance of the feature's own class. So
# nothing needs the types of the fields of this class.
if TYPE_CHECKING:

    class FeatureOptions(BaseModel):
        """The options of all features."""

else:
    _CLASSES = tuple(options for each in FEATURES if (options := each.options()))
    FeatureOptions = create_model("FeatureOptions", __base__=_CLASSES or BaseModel)


class ModelOptions(FeatureOptions, ReplicaOptions, RouterOptions, DeploymentOptions):
    """All options of one model: for its replicas, routers and features, and for Ray Serve."""

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
