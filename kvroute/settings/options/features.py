"""The options of all features, as one class.

Only the sides of a feature read its options, as an instance of the feature's own class. So nothing
needs the types of the fields of this class.
"""

from typing import TYPE_CHECKING

from pydantic import BaseModel, create_model

from kvroute.features import FEATURES

if TYPE_CHECKING:

    class FeatureOptions(BaseModel):
        """The options of all features."""

else:
    _CLASSES = tuple(options for each in FEATURES if (options := each.options()))
    FeatureOptions = create_model("FeatureOptions", __base__=_CLASSES or BaseModel)
