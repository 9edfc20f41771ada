"""The options for Ray Serve, which starts and stops the replicas of a model."""

from typing import Annotated

from pydantic import BaseModel, Field

from kvroute.settings.help import Option
from kvroute.settings.options.common import ATTACH, CLUSTER, REPLICAS, SERVE, NotNegative, Positive


class DeploymentOptions(BaseModel):
    """The options for Ray Serve. Neither replicas nor routers receive them."""

    replicas: Annotated[
        int,
        Positive,
        Option(REPLICAS, "Number of replicas, each with its own KV cache.", basic=SERVE),
    ] = 2
    own_replicas: Annotated[
        int,
        NotNegative,
        Option(
            REPLICAS,
            "With --attach: number of replicas that kvroute starts itself, with the same model as "
            "the attached servers.",
            basic=ATTACH,
        ),
    ] = 0
    max_replicas: Annotated[
        int | None,
        Positive,
        Option(
            REPLICAS,
            "Maximum replicas. The fleet then scales with its load, and --replicas is the minimum.",
            example="8",
            default="same as --replicas",
        ),
    ] = None
    gpus_per_replica: Annotated[
        int | None,
        NotNegative,
        Option(
            REPLICAS,
            "GPUs of one replica, divided equally among its data parallel ranks for tensor "
            "parallelism.",
            example="1",
            default="1 for each rank if the machine has GPUs",
            flags=("--gpus-per-replica", "--tensor-parallel-size"),
            basic=SERVE,
        ),
    ] = None
    target_wait_s: Annotated[
        float,
        Field(gt=0),
        Option(
            CLUSTER,
            "If requests would wait longer than this many seconds, replicas are added, up to "
            "--max-replicas.",
        ),
    ] = 1.0
    shrink_delay_s: Annotated[
        float,
        NotNegative,
        Option(
            REPLICAS,
            "Seconds for which one replica less must have been enough for the load, before a "
            "replica and its cache are removed.",
        ),
    ] = 300.0
