"""The options of stored responses, which routers receive."""

from typing import Annotated

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import ENDPOINT, NotNegative


class ResponseOptions(BaseModel):
    """The options of stored responses."""

    response_store_mb: Annotated[
        int,
        NotNegative,
        Option(
            ENDPOINT,
            "Redis memory in MB for the stored responses of each model, which previous_response_id "
            "needs. 0: responses are not stored.",
            example="256",
        ),
    ] = 0
    response_ttl_s: Annotated[
        float,
        Field(gt=0, le=1e9),
        Option(ENDPOINT, "Seconds from a stored response's last use until it expires."),
    ] = 86_400.0
